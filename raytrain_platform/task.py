"""The contract with the user's code: what is trained, on what, and how well it does."""

from __future__ import annotations

import abc
import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate

from raytrain_platform.errors import TaskError


@runtime_checkable
class SizedDataset(Protocol):
    """A map-style data set: its length, and one sample for each index below it."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return sample ``index``, the same on every replica up to randomness from the global generators."""


class Loss(NamedTuple):
    """The loss of one shard."""

    mean: torch.Tensor
    """Scalar: the loss averaged over ``weight`` things; its gradient is what is trained on."""

    weight: float | torch.Tensor
    """What ``mean`` was averaged over (samples, tokens, ...): shards count by it, so uneven ones are right."""


class Task(abc.ABC):
    """What a job trains.

    A task is built anew, with the parameters of the spec, in every worker. Nothing in it may depend on which
    worker it runs in. The platform seeds the generators of ``random``, ``numpy.random`` and ``torch`` before
    ``build_model``, before it reads the samples of each shard, and before each ``loss``.
    """

    @abc.abstractmethod
    def build_model(self) -> nn.Module:
        """Return the model, freshly initialized."""

    @abc.abstractmethod
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer over the parameters of ``model`` that are to be trained."""

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return a learning-rate schedule, stepped once after every step, or None."""
        return None

    @abc.abstractmethod
    def train_data(self) -> SizedDataset:
        """Return the training data."""

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the loss of one shard.

        Args:
            model: The model, in training mode.
            batch: What ``collate`` made of the shard's samples.
        """

    def collate(self, samples: Sequence[Any]) -> Any:
        """Make a batch of samples: tensors, or tuples or dicts of them."""
        return default_collate(list(samples))

    def eval_data(self) -> SizedDataset | None:
        """Return the data to evaluate on, or None to evaluate nothing."""
        return None

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[float | torch.Tensor, float | torch.Tensor]]:
        """Return, for each metric, its sum over the batch and the count it was summed over.

        The platform reports the total of the sums over the total of the counts, the same at every number of replicas.

        Args:
            model: The model, in evaluation mode, without gradients.
            batch: What ``collate`` made of some samples of ``eval_data``.
        """
        raise TaskError(f"{type(self).__name__} gives eval_data but no evaluate: add evaluate(model, batch)")


def load_task(path: str) -> type[Task]:
    """Import a task class, with the working directory on the import path.

    Args:
        path: ``package.module:Class``.

    Raises:
        TaskError: The module or the class is missing, or the class is no ``Task``.
    """
    module_name, _, class_name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise TaskError(
                f"task {path!r}: its module needs {error.name!r}, which is not installed; "
                f"install it on every node, or name it in the job's runtime environment"
            ) from error
        raise TaskError(
            f"task {path!r}: no module {module_name!r} from {Path.cwd()}; run from the folder that holds it, "
            f"or submit it with `ray job submit --working-dir`"
        ) from error
    except Exception as error:
        raise TaskError(
            f"task {path!r}: importing {module_name!r} raised {type(error).__name__}: {error}; correct it there"
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        tasks = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Task) and v is not Task]
        raise TaskError(
            f"task {path!r}: {module_name!r} has no {class_name!r}; name one of its tasks: {', '.join(tasks) or 'none'}"
        )
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise TaskError(f"task {path!r}: {class_name!r} is not a Task; derive it from raytrain_platform.Task")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise TaskError(f"task {path!r}: {class_name!r} does not define {missing}; add what is missing")
    return found


def importable(task_type: type[Task]) -> type[Task]:
    """The same class, imported from its file if it was defined in the script that runs.

    Workers then import it too, as ``multiprocessing`` has it, rather than unpickle a class: not every class can be
    pickled. Classes of a notebook, or of a script outside the working directory, stay as they are.
    """
    file = getattr(sys.modules["__main__"], "__file__", None)
    if task_type.__module__ != "__main__" or file is None:
        return task_type
    script = Path(file).resolve()
    if not script.is_relative_to(Path.cwd()):
        return task_type
    parts = script.relative_to(Path.cwd()).with_suffix("").parts
    if not all(part.isidentifier() for part in parts):
        return task_type
    return load_task(f"{'.'.join(parts)}:{task_type.__qualname__}")


def build_task(task_type: type[Task], params: Mapping[str, Any]) -> Task:
    """Build a task with the parameters of a spec.

    Raises:
        TaskError: The class does not take these parameters, and the message says which it takes; or it refused
            their values.
    """
    signature = inspect.signature(task_type)
    try:
        signature.bind(**params)
    except TypeError as error:
        accepted = ", ".join(_parameter(p) for p in signature.parameters.values()) or "none"
        raise TaskError(
            f"{task_type.__name__} cannot take params {dict(params)!r}: {error}; the params it takes: {accepted}"
        ) from None
    try:
        return task_type(**params)
    except Exception as error:
        raise TaskError(
            f"{task_type.__name__} refused params {dict(params)!r}: {type(error).__name__}: {error}; correct the params"
        ) from error


def _parameter(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
