"""`make digests`: the digests that the images of others have now, for those who start exactly these.

Writes `images.env`, whose lines belong into `compose/.env`, and `images/kustomization.yaml`, a component for overlays.
What the registries say is asked with `docker buildx imagetools`, which knows their logins and mirrors.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.dependencies.images import Image, named_images
from tests.dependencies.pins import ROOT

_TIMEOUT_S = 60
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_VARIABLE = re.compile(r"\$\{(?P<variable>\w*_IMAGE):-(?P<reference>[\w./-]+:[\w.+-]+)\}")


class NoDigest(Exception):
    """The registry has not said which digest an image has, with the reason."""


def digest_of(reference: str) -> str:
    """The digest that a tag has at its registry. Raises `NoDigest`."""
    command = ["docker", "buildx", "imagetools", "inspect", "--format", "{{json .Manifest}}", reference]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        digest = str(json.loads(found.stdout)["digest"])
    except subprocess.CalledProcessError as error:
        raise NoDigest(error.stderr.strip().splitlines()[-1] if error.stderr.strip() else str(error)) from error
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        raise NoDigest(str(error)) from error
    if not _DIGEST.fullmatch(digest):
        raise NoDigest(f"{digest[:80]!r} is no digest")
    return digest


def variables() -> dict[str, str]:
    """The images of others in compose/, by the variables that replace them."""
    others = {each.reference for each in named_images()}
    texts = (path.read_text(encoding="utf-8") for path in sorted((ROOT / "compose").glob("*.yaml")))
    found = (match for text in texts for match in _VARIABLE.finditer(text))
    return {match["variable"]: match["reference"] for match in found if match["reference"] in others}


def as_env(digests: Mapping[str, str]) -> str:
    """The variables of compose/, with digests by reference."""
    lines = [f"{name}={reference}@{digests[reference]}\n" for name, reference in sorted(variables().items())]
    return "".join(lines)


def as_component(images: list[Image], digests: Mapping[str, str]) -> str:
    """A component of kustomize for the images in k8s/."""
    names = {each.name: each.reference for each in images if each.area == "k8s"}
    entries = [f"  - name: {name}\n    digest: {digests[reference]}\n" for name, reference in sorted(names.items())]
    return "apiVersion: kustomize.config.k8s.io/v1alpha1\nkind: Component\nimages:\n" + "".join(entries)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1, and nothing is written, if a registry has not answered."""
    parser = argparse.ArgumentParser(prog="make digests", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "digests", help="directory; default: build/digests"
    )
    out: Path = parser.parse_args(arguments).out
    images, digests, missing = list(named_images()), dict[str, str](), 0
    for reference in sorted({each.reference for each in images}):
        try:
            digests[reference] = digest_of(reference)
            print(f"{reference}@{digests[reference]}")
        except NoDigest as reason:
            print(f"{reference}: {reason}", file=sys.stderr)
            missing += 1
    if missing:
        print(f"{missing} of {len(digests) + missing} images have no digest: nothing was written.", file=sys.stderr)
        return 1
    (out / "images").mkdir(parents=True, exist_ok=True)
    (out / "images.env").write_text(as_env(digests), encoding="utf-8")
    (out / "images" / "kustomization.yaml").write_text(as_component(images, digests), encoding="utf-8")
    print(f"Written to {out}: images.env for Compose, images/ as a component for Kubernetes.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
