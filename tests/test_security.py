"""On a Hopper GPU a run asks the kernel hub for FlashAttention 3, but not if it is offline."""

import os

from tests.common import ROOT, run_script

# As sitecustomize.py this ends a process with exit code 99 once it reaches for the network.
GUARD = """
import os, socket

def forbidden(*_, **__):
    os.write(2, b"NETWORK")
    os._exit(99)

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = forbidden
"""


# Calls load_fa3 as on a Hopper GPU, first offline and then online.
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


def test_the_kernel_hub_is_asked_only_online(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(GUARD)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = run_script("-c", HOPPER, PYTHONPATH=path, HF_HUB_OFFLINE=1, HF_HOME=tmp_path)
    assert done.returncode == 99, done.stderr
    assert done.stdout.count("passed over: ") == 1
