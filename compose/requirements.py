"""`python3 requirements.py [EXTRA...]`: pdserve's dependencies with these extras, for pip's `-r`.

Images install them before pdserve itself, so that a change of its code does not install them again.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = [requirement for extra in sys.argv[1:] for requirement in project["optional-dependencies"][extra]]
sys.stdout.writelines(f"{requirement}\n" for requirement in [*project["dependencies"], *extras])
