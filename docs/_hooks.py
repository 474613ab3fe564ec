"""What mkdocs has to be told about pages that are also read on a forge, as they lie in the repository."""

import os
import re
import subprocess
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

BESIDE = ("examples", "src/codd/training/recipes", "lab/codd_lab/recipes")
"""Folders outside of docs/ to whose files pages link; they are copied into the site."""
LEAVES = re.compile(rf"\]\(\.\./((?:\.\./)*(?:{'|'.join(BESIDE)})/)")
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link the repository that the site is built from: a forge's workflow names it, a clone has it as its origin."""
    name = os.environ.get("GITHUB_REPOSITORY")
    command = ["git", "-C", config.docs_dir, "remote", "get-url", "origin"]
    origin = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    url = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}" if name else origin
    if url.startswith("https://"):
        config.repo_url, config.repo_name = url.removesuffix(".git"), "Source"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that lie beside docs/."""
    root = Path(config.docs_dir).parent
    for path in (path for folder in BESIDE for path in sorted((root / folder).iterdir()) if path.is_file()):
        files.append(File.generated(config, str(path.relative_to(root)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links that leave docs/ lead to the copies; lists are spelled as Python-Markdown reads them.

    It wants four spaces before an inner item and a blank line before a list, where forges do with less.
    """
    parts = CODE.split(markdown)
    for i in range(0, len(parts), 2):  # the others are code
        text = LEAVES.sub(r"](\1", parts[i])
        text = re.sub(r"^ {2,3}(?=[-*] )", "    ", text, flags=re.MULTILINE)
        parts[i] = re.sub(r"(?<=:\n)(?=- )", "\n", text)
    return "".join(parts)
