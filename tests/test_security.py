"""Nothing that was downloaded, prepared or logged is run as code, and a run talks to nobody."""

import ast
import os

from tests.common import ROOT, run_script

import pytest

FORBIDDEN = {
    "pickle",
    "shelve",
    "marshal",
    "eval",
    "exec",
    "compile",
    "joblib",
    "dill",
    "allow_pickle",
    "shell",
    "__import__",
}
LOADERS = ("torch.load", "os.system", "yaml.load")


def dangers(source):
    """Names through which data could become code: imports, calls and keywords, and torch.load."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from FORBIDDEN.intersection(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from FORBIDDEN.intersection({node.module, *(alias.name for alias in node.names)})
        elif isinstance(node, ast.Name):
            yield from FORBIDDEN.intersection({node.id})
        elif isinstance(node, ast.keyword):
            yield from FORBIDDEN.intersection({node.arg})
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in LOADERS:
            yield ast.unparse(node)


@pytest.mark.parametrize("name", ["prepare.py", "train.py"])
def test_no_data_becomes_code(name):
    source = (ROOT / name).read_text()
    assert not list(dangers(source))
    for line in (
        "torch.load(p)",
        "import pickle",
        "np.load(p, allow_pickle=True)",
        "eval(x)",
        "from marshal import loads",
    ):
        assert list(dangers(f"{source}\n{line}\n")), line  # the check itself can fail


# ---- Network ----
GUARD = """
import os, socket

def forbidden(*_, **__):
    os.write(2, b"NETWORK")
    os._exit(99)

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = forbidden
"""


@pytest.fixture
def guarded(tmp_path):
    """Runs a program in a process that ends with 99 as soon as it reaches for the network."""
    (tmp_path / "sitecustomize.py").write_text(GUARD)

    def run(program, **environment):
        path = f"{tmp_path}{os.pathsep}{ROOT}"
        return run_script("-c", program, **({"PYTHONPATH": path} | environment))

    return run


def test_the_guard_notices(guarded):
    program = "import socket; socket.create_connection(('127.0.0.1', 9))"
    assert guarded(program).returncode == 99


# On a GPU that FlashAttention 3 is for; capability and device are all that is asked before the hub.
HOPPER = """
import huggingface_hub.constants, torch, train
torch.cuda.get_device_capability = lambda: (9, 0)
for offline in (True, False):
    huggingface_hub.constants.HF_HUB_OFFLINE = offline
    try:
        train.load_fa3()
    except Exception as error:
        print("passed over:", type(error).__name__, flush=True)
"""


def test_the_kernel_hub_is_asked_only_online(guarded, tmp_path):
    done = guarded(HOPPER, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert done.returncode == 99, done.stderr
    assert done.stdout.count("passed over: ") == 1
