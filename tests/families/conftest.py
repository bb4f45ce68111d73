"""Families that some version of transformers gets wrong are not compared with it there."""

import pytest
import transformers
from packaging.version import Version

GROUPS = ("5.23", "its torch path of Mamba2 mixes up the groups of a state")
WRONG_BEFORE = {  # a version of transformers -> what was wrong in it
    "minimax_m2": ("5.18", "it turns all of a head, whatever rotary_dim says"),
    **dict.fromkeys(("mamba2", "bamba", "granitemoehybrid", "granitemoehybrid/dense"), GROUPS),
}
WRONG_IN = {"llama4": ("5.24.0", "its whole model reads outputs that its text model no longer has")}


@pytest.fixture(autouse=True)
def right_in_this_version(request):
    given = getattr(request.node, "callspec", None)
    name = given.params.get("name") if given and request.path.name in ("test_native.py", "test_pictures.py") else None
    version, what = WRONG_BEFORE.get(name, ("0", ""))
    if Version(transformers.__version__) < Version(version):
        pytest.skip(f"transformers before {version}: {what}")
    version, what = WRONG_IN.get(name, ("0", ""))
    if transformers.__version__ == version:
        pytest.skip(f"transformers {version}: {what}")
