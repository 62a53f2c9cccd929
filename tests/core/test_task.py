from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytrain_platform.errors import TaskError
from raytrain_platform.task import Task, build_task, load_task

MODULE = """
    import torch
    from raytrain_platform.task import Loss, Task

    class Whole(Task):
        def __init__(self, width, depth=2):
            if depth > 9:
                raise ValueError(f"need depth <= 9, got {depth}")
            self.width, self.depth = width, depth
        def build_model(self): return torch.nn.Linear(1, 1)
        def build_optimizer(self, model): return torch.optim.SGD(model.parameters())
        def train_data(self): return [torch.ones(1)]
        def loss(self, model, batch): return Loss(model(batch).mean(), len(batch))
        def eval_data(self): return [torch.ones(1)]

    class Plain(Whole):
        def __init__(self): pass

    class Half(Task):
        def build_model(self): return torch.nn.Linear(1, 1)

    class Other: pass

    number = 3
"""


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's, which is the working directory; its modules are forgotten afterwards."""
    (tmp_path / "usertasks.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def refusal(path: str) -> str:
    with pytest.raises(TaskError) as caught:
        load_task(path)
    assert path in str(caught.value)
    return str(caught.value)


def test_a_task_is_found_in_the_working_directory(user_code: Path) -> None:
    task_type = load_task("usertasks:Whole")
    assert issubclass(task_type, Task) and task_type.__name__ == "Whole"
    assert load_task("usertasks:Whole") is task_type


@pytest.mark.parametrize("path", ["usertask:Whole", "usertasks.inner:Whole", "nowhere.at.all:Whole"])
def test_an_unknown_module_is_named_with_the_folder_it_was_sought_in(user_code: Path, path: str) -> None:
    said = refusal(path)
    assert f"no module {path.partition(':')[0]!r} from {user_code}" in said
    assert "run from the folder that holds it" in said


# The second of them is a prefix of the module's own name.
@pytest.mark.parametrize("dependency", ["a_library_nobody_has", "needs"])
def test_a_dependency_that_is_not_installed_is_not_mistaken_for_the_task(user_code: Path, dependency: str) -> None:
    (user_code / "needs_more.py").write_text(f"import {dependency}\n")
    said = refusal("needs_more:Whole")
    assert f"its module needs '{dependency}', which is not installed; install it on every node" in said


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("from math import no_such_function\n", "ImportError: cannot import name 'no_such_function'"),
    ],
)
def test_a_module_that_raises_is_named_with_its_error(user_code: Path, code: str, cause: str) -> None:
    (user_code / "broken.py").write_text(code)
    said = refusal("broken:Whole")
    assert f"importing 'broken' raised {cause}" in said


def test_the_error_of_a_module_is_kept(user_code: Path) -> None:
    (user_code / "broken.py").write_text("1 / 0\n")
    with pytest.raises(TaskError) as caught:
        load_task("broken:Whole")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_unknown_class_is_told_which_there_are(user_code: Path) -> None:
    said = refusal("usertasks:Hole")
    assert "'usertasks' has no 'Hole'; name one of its tasks: Whole, Plain, Half" in said


@pytest.mark.parametrize("name", ["Other", "number"])
def test_something_that_is_no_task_is_refused(user_code: Path, name: str) -> None:
    assert f"{name!r} is not a Task; derive it from raytrain_platform.Task" in refusal(f"usertasks:{name}")


def test_a_task_that_lacks_methods_is_told_which(user_code: Path) -> None:
    assert "'Half' does not define build_optimizer, loss, train_data" in refusal("usertasks:Half")


def test_parameters_reach_the_task(user_code: Path) -> None:
    task: Any = build_task(load_task("usertasks:Whole"), {"width": 3})
    assert (task.width, task.depth) == (3, 2)


@pytest.mark.parametrize(
    ("class_name", "params", "said"),
    [
        ("Whole", {"width": 3, "deph": 1}, "unexpected keyword argument 'deph'; the params it takes: width, depth=2"),
        ("Whole", {}, "missing a required argument: 'width'; the params it takes: width, depth=2"),
        ("Plain", {"width": 3}, "unexpected keyword argument 'width'; the params it takes: none"),
        ("Whole", {"width": 3, "depth": 10}, "ValueError: need depth <= 9, got 10; correct the params"),
    ],
)
def test_wrong_parameters_are_told_what_is_taken(
    user_code: Path, class_name: str, params: dict[str, Any], said: str
) -> None:
    with pytest.raises(TaskError) as caught:
        build_task(load_task(f"usertasks:{class_name}"), params)
    assert said in str(caught.value)
    assert str(caught.value).startswith(class_name) and repr(params) in str(caught.value)


def test_data_to_evaluate_on_needs_evaluate(user_code: Path) -> None:
    task = build_task(load_task("usertasks:Plain"), {})
    with pytest.raises(TaskError, match=r"Plain gives eval_data but no evaluate: add evaluate\(model, batch\)"):
        task.evaluate(task.build_model(), None)
