"""What happens in other processes: where the package was not imported, and where it is not installed."""

import pytest

from tests.small import patched
from tests.subprocesses import run_python
from tests.tiny_models import BERT

BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_linear_attn":
            raise ModuleNotFoundError("No module named 'hf_linear_attn'", name=name)
sys.meta_path.insert(0, Blocker())
"""


def run(code, *arguments):
    return run_python("-c", code, *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    patched("hedgehog", BERT).save_pretrained(path)
    return path


def test_importing_the_package_is_light():
    result = run(
        "import sys, hf_linear_attn\n"
        "assert hf_linear_attn.__version__ and dir(hf_linear_attn) == sorted(hf_linear_attn.__all__)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'accelerate', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_loading_elsewhere_needs_trust_remote_code(folder):
    result = run(
        "import sys, torch\n"
        "from transformers import AutoModelForMaskedLM\n"
        "path = sys.argv[1]\n"
        "try:\n"
        "    AutoModelForMaskedLM.from_pretrained(path, trust_remote_code=False)\n"
        "except Exception as error:\n"
        "    print('REFUSED', type(error).__name__, error)\n"
        "assert 'hf_linear_attn' not in sys.modules\n"
        "model = AutoModelForMaskedLM.from_pretrained(path, trust_remote_code=True)\n"
        "ids = torch.arange(5)[None] + 2\n"
        "print('PATCHED', 'linear_attention' in repr(model), bool(torch.isfinite(model(ids).logits).all()))\n",
        folder,
    )
    assert result.returncode == 0, result.stderr
    assert "REFUSED" in result.stdout
    assert "hf_linear_attn" in result.stdout.partition("PATCHED")[0]
    assert "PATCHED True True" in result.stdout


@pytest.mark.slow
def test_where_the_package_is_missing_the_error_says_what_to_install(folder):
    result = run(
        BLOCKED + "from transformers import AutoModelForMaskedLM\n"
        "AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n",
        folder,
    )
    assert result.returncode != 0
    assert "ImportError" in result.stderr
    assert "pip install hf_linear_attn" in result.stderr
