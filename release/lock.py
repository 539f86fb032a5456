"""What mhsa-runtime needs, version by version, with the hash of every file that may be installed for it.

python -m release.lock       # writes release/runtime-requirements.txt, by uv and whatever index it is set up with

pip install --require-hashes -r release/runtime-requirements.txt
pip install --no-deps dist/mhsa_runtime-*.whl
"""

from __future__ import annotations

import subprocess
import sys
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release.wheels import REPOSITORY, REQUIRED

LOCK = REPOSITORY / "release" / "runtime-requirements.txt"
HEADER = """\
# Written by `make lock`: what the wheel mhsa-runtime needs, in the versions of constraints.txt, for any machine.
#   pip install --require-hashes -r release/runtime-requirements.txt && pip install --no-deps mhsa_runtime-*.whl
"""


def main() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    asked = [line for line in project["dependencies"] if canonicalize_name(Requirement(line).name) in REQUIRED]
    oldest = project["requires-python"].removeprefix(">=")
    words = ["--universal", "--generate-hashes", "--no-emit-index-url", "--no-header", "--no-annotate"]
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", *words, "--python-version", oldest]
    command += ["--constraint", str(REPOSITORY / "constraints.txt")]
    lines = subprocess.run(command, input="\n".join(asked), check=True, capture_output=True, text=True).stdout
    LOCK.write_text(HEADER + lines)


if __name__ == "__main__":
    main()
