"""The notebook of examples/ runs from the first cell to the last, with smaller sizes than the reader's."""

import nbclient
import nbformat
import pytest

from tests.support import ROOT

NOTEBOOK = ROOT / "examples" / "tour.ipynb"
SMALLER = {
    "LENGTH, CALLS, SHOWN = 128, 8, 12": "LENGTH, CALLS, SHOWN = 8, 1, 4",
    "TRAINING = []": 'TRAINING = ["steps=1", "row_length=64", "batch_windows=8", "bank.windows=8", '
    '"bank.rows_at_once=1", "ratios=[0.05]", "validate_every=1"]',
    "generate(question)": "generate(question, gen_length=64)",
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter's own packages
def test_every_cell_runs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for old, new in SMALLER.items():
        assert sum(old in cell.source for cell in code), f"{NOTEBOOK.name} does not say {old!r} any more"
        for cell in code:
            cell.source = cell.source.replace(old, new)
    assert not any(cell.outputs for cell in code), "what is committed has no outputs: they are large and change"
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()

    def printed(part: str) -> str:
        cell = next(cell for cell in code if part in cell.source)
        return "".join(str(output.get("text", "")) for output in cell.outputs)

    alone, joined = printed("generate(question").split("--- with the circuit")
    assert "#### 336" in alone
    assert "#### 336" in joined
    assert "trained:" in printed('"train"')
    pictures = [output for cell in code for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 2  # San York, and the mutual information of masks
