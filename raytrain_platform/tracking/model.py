"""The trained model among the files of its run: as a graph that loads without unpickling, else as bare weights."""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from raytrain_platform.tracking.location import mask_secrets

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.models import ModelSignature

logger = logging.getLogger(__name__)

MODEL_TAG: Final = "raytrain.model"
WEIGHTS_FILE: Final = "raytrain/model.safetensors"

_MAX_REASON_LENGTH = 500


def log_model(client: MlflowClient, run_id: str, model: nn.Module, example: tuple[Any, ...] | None) -> str:
    """Keep the model with the run.

    Args:
        client: Connection to the store.
        run_id: The run.
        model: The model; it is copied, and the copy moved to the CPU and put in evaluation mode.
        example: Inputs of ``model.forward``. One tensor of two or more rows makes a model for any number of rows.

    Returns:
        ``models:/...``, which ``mlflow.pytorch.load_model`` takes, or the name of the file of weights.
    """
    model = copy.deepcopy(model).cpu().eval()
    try:
        with warnings.catch_warnings():
            # What tracing warns about concerns those who write models for it; whether it worked is what counts.
            warnings.simplefilter("ignore")
            uri = _log_graph(client, run_id, model, _single_tensor(example))
    except Exception as error:
        reason = mask_secrets(f"{type(error).__name__}: {error}".split("\n")[0])[:_MAX_REASON_LENGTH]
        logger.warning("the model is kept as weights only (%s), not as a graph: %s", WEIGHTS_FILE, reason)
        _log_weights(client, run_id, model)
        client.set_tag(run_id, MODEL_TAG, f"weights only in {WEIGHTS_FILE}, since {reason}")
        return WEIGHTS_FILE
    client.set_tag(run_id, MODEL_TAG, uri)
    return uri


def _single_tensor(example: tuple[Any, ...] | None) -> torch.Tensor:
    if not example:
        raise ValueError("there is no example input to trace the model with")
    if len(example) != 1 or not isinstance(example[0], torch.Tensor):
        kinds = ", ".join(type(part).__name__ for part in example)
        raise ValueError(f"only a model of one tensor can be traced, got ({kinds})")
    return example[0].detach().cpu()


def _log_graph(client: MlflowClient, run_id: str, model: nn.Module, example: torch.Tensor) -> str:
    import mlflow.pytorch
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model

    run = client.get_run(run_id)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        # Exported before anything is created in the store: a model that cannot be leaves nothing behind.
        mlflow.pytorch.save_model(
            model,
            folder,
            mlflow_model=Model(run_id=run_id),
            signature=_signature(model, example),
            input_example=example.numpy(),
            # Left out, MLflow finds them by importing everything, which takes seconds.
            pip_requirements=[f"{package}=={version(package)}" for package in ("mlflow", "torch", "numpy")],
            serialization_format="pt2",
        )
        logged = client.create_logged_model(run.info.experiment_id, name="model", source_run_id=run_id)
        description = Model.load(folder)
        description.model_id, description.model_uuid = logged.model_id, logged.model_id
        description.artifact_path = logged.artifact_location
        description.save(folder / "MLmodel")
        client.log_model_artifacts(logged.model_id, str(folder))
    client.finalize_logged_model(logged.model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
    return str(logged.model_uri)


def _signature(model: nn.Module, example: torch.Tensor) -> ModelSignature:
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def schema(tensor: torch.Tensor) -> Schema:
        array = tensor.numpy()
        return Schema([TensorSpec(array.dtype, (-1, *array.shape[1:]))])

    with torch.no_grad():
        output = model(example)
    is_tensor = isinstance(output, torch.Tensor) and output.ndim > 0
    return ModelSignature(inputs=schema(example), outputs=schema(output) if is_tensor else None)


def _log_weights(client: MlflowClient, run_id: str, model: nn.Module) -> None:
    from safetensors.torch import save_model

    folder, _, name = WEIGHTS_FILE.rpartition("/")
    with tempfile.TemporaryDirectory() as scratch:
        # save_model, not save_file: it keeps tied weights once and load_model ties them again.
        save_model(model, str(Path(scratch) / name))
        client.log_artifact(run_id, str(Path(scratch) / name), folder)
