import subprocess
import sys
from pathlib import Path


def test_d5_python_dash_m_router_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "router", "--help"],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        check=True,
    )

    assert done.stdout.startswith(b"Usage: fencepost ")
