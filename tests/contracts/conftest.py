from __future__ import annotations

import uuid

import pytest

from tests.contracts.checkpoint_places import Place


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    root = str(tmp_path) if request.param == "local" else f"/{uuid.uuid4().hex}"
    scheme = "file" if request.param == "local" else "memory"
    place = Place(
        f"{scheme}://{root}/job", f"failing-{request.param}://{root}/job", 16 if request.param == "local" else 1
    )
    yield place
    place.empty()
