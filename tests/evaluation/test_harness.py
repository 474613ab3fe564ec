"""codd models in lm-eval's own command line, with the library alone."""

import json
import os
import subprocess
import sys

import pytest

from tests.support import PROBLEMS

pytest.importorskip("lm_eval")
TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["##"]}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


def test_the_command_line_of_lm_eval(tmp_path):
    (tmp_path / "sums.yaml").write_text(TASK.replace("DATA", str(PROBLEMS / "test.jsonl")))
    command = [sys.executable, "-m", "codd.evaluation.harness", "--model", "codd", "--tasks", "sums", "--limit", "2"]
    command += ["--model_args", "circuit=null,steps=2,gen_length=16", "--include_path", str(tmp_path), "--log_samples"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    command += ["--output_path", str(tmp_path / "out")]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
    [log] = (tmp_path / "out").rglob("samples_sums_*.jsonl")
    samples = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(samples) == 2
    assert all(isinstance(sample["resps"][0][0], str) and sample["resps"][0][0] for sample in samples)
    assert not any("##" in sample["resps"][0][0] for sample in samples)
