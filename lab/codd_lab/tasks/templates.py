"""Prompt templates: several wordings of one task in one run, since rankings may change with the wording."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from codd import validation
from codd.data.yaml_files import read_yaml
from codd.errors import FormatError, InvalidInput
from codd.validation import FolderName, Section

QUESTION = "{question}"
"""Where a template has the question; other braces are plain text."""
DEFAULT = "default"
"""The name of the task's own prompt, which is no template."""
WORDINGS = {
    "plain": QUESTION,
    "step-by-step": f"{QUESTION}\n\nThink step by step. Then {{finish}}.",
    "terse": f"Answer as briefly as you can: {{finish}}.\n\n{QUESTION}",
}
"""The built-in templates. In the place of {finish} is how this task wants its answer to end."""
BUILT_IN = (DEFAULT, *WORDINGS)
FINISHES = {
    "gsm8k": "write #### and the final number",
    "word_problems": "write #### and the final number",
    "minerva_math500": "write the final answer as \\boxed{ANSWER}",
    "gpqa_main_generative_n_shot": "write the letter of the right choice in brackets, as in (A)",
    "mbpp_instruct": "write the function in Python",
    "last-number": "write the final number",
    "letter": "write the letter of the right choice in brackets, as in (A)",
    "exact": "write the answer and nothing else",
}
"""How an answer must end, by task, and by answer rule for task files."""
OTHERWISE = "write the final answer"
SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class PromptTemplate(Section):
    """A wording of a task's prompt; InvalidInput if it has no place for the question."""

    name: FolderName
    text: str
    """What the user says, with {question} where the question goes."""
    system: str | None = None
    """The system message; None for the task's own."""

    def __post_init__(self) -> None:
        """Refuse the name of the task's own prompt, and a text without a question: all problems would be the same."""
        if self.name == DEFAULT:
            raise InvalidInput(f"the name {DEFAULT!r} is that of the task's own prompt: rename the template.")
        if QUESTION not in self.text:
            raise InvalidInput(f"the template {self.name!r} lacks {QUESTION}, the place for the question.")

    def fill(self, question: str) -> str:
        """The text with a question in its place."""
        return self.text.replace(QUESTION, question)


def built_in(name: str, task: str, answer_rule: str | None = None) -> PromptTemplate | None:
    """The built-in template of a name, worded for a task or for the answer rule of a task file; None: the task's own.

    InvalidInput if there is none of this name.
    """
    if name == DEFAULT:
        return None
    if name not in WORDINGS:
        raise InvalidInput(
            f"there is no template {name!r}; give some of {', '.join(BUILT_IN)}, or a .yaml or .json file of your own."
        )
    return PromptTemplate(name, WORDINGS[name].replace("{finish}", FINISHES.get(answer_rule or task, OTHERWISE)))


def read_templates(path: Path) -> list[PromptTemplate]:
    """The templates of a YAML or JSON file: a list of sections with name, text and, if wanted, system.

    FormatError if it is none, or if a template has no place for the question.
    """
    content = read_yaml(path)
    if not isinstance(content, list) or not content:
        raise FormatError(
            f"{path}: expected a list of templates, such as [{{name: short, text: '{QUESTION} Be brief.'}}]."
        )
    return [
        validation.build(PromptTemplate, each, f"{path}: template {number}") for number, each in enumerate(content, 1)
    ]


def chosen_templates(names: Sequence[str], task: str, answer_rule: str | None = None) -> list[PromptTemplate | None]:
    """The templates of ``--templates`` for a task: built-in ones by name, others by file. None is the task's own.

    InvalidInput for two of one name.
    """
    chosen: list[PromptTemplate | None] = []
    for name in names:
        is_file = name not in BUILT_IN and (Path(name).suffix in SUFFIXES or Path(name).is_file())
        chosen += read_templates(Path(name)) if is_file else [built_in(name, task, answer_rule)]
    labels = [label(each) for each in chosen]
    for each in labels:
        if labels.count(each) > 1:
            raise InvalidInput(f"two templates have the name {each!r}: rename one.")
    return chosen


def label(template: PromptTemplate | None) -> str:
    """The name of a template; "default" for the task's own prompt."""
    return DEFAULT if template is None else template.name
