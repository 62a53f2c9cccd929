"""A character-level language model, trained on the English text of Python's own documentation.

The text is the standard library's ``pydoc_data.topics``, so nothing is downloaded; it differs a little between
releases of Python, and all workers of a job must run the same one.

Shapes: B windows, T positions of a window, V characters of the vocabulary, D width of the model, H heads,
K width of a head, N characters of a text.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from raytrain_platform.task import Loss, Task

EVAL_FRACTION = 0.1
"""Share of the text, at its end, that is evaluated on and never trained on."""


class Text(NamedTuple):
    """The text as numbers."""

    vocabulary: tuple[str, ...]
    """The characters of the text, sorted; a character's token is its position here."""

    train_N: torch.Tensor
    eval_N: torch.Tensor


@functools.cache
def load_text() -> Text:
    """Read the text and split it by position, so that no window straddles the two parts."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    characters, tokens_N = np.unique(np.array(list(text)), return_inverse=True)
    all_N = torch.from_numpy(tokens_N.astype(np.int64))
    num_train = int(len(all_N) * (1 - EVAL_FRACTION))
    return Text(tuple(characters.tolist()), all_N[:num_train], all_N[num_train:])


class Windows:
    """A text as a map-style data set of windows: ``context`` characters to read, and the one that follows each."""

    def __init__(self, tokens_N: torch.Tensor, context: int, stride: int) -> None:
        """Start a window at every ``stride``-th character; a shorter rest at the end is left out."""
        if len(tokens_N) <= context:
            raise ValueError(f"need context < {len(tokens_N)}, the characters of the text, got context {context}")
        self.windows_BT = tokens_N.unfold(0, context + 1, stride)

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.windows_BT)

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one window: tokens to read and tokens to predict."""
        window_T = self.windows_BT[index]
        return window_T[:-1], window_T[1:]


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer, each added to its normalized input."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.attention_in = nn.Linear(dim, 3 * dim)
        self.attention_out = nn.Linear(dim, dim)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.feed_forward_in = nn.Linear(dim, 4 * dim)
        self.feed_forward_out = nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Return the block's output, of the same shape."""
        qkv_BTD = self.attention_in(self.attention_norm(x_BTD))
        q_BHTK, k_BHTK, v_BHTK = (
            part_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part_BTD in qkv_BTD.chunk(3, dim=-1)
        )
        # No dropout on the attention weights: with it torch leaves the fused kernel for one several times slower.
        mixed_BHTK = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.dropout(self.attention_out(mixed_BHTK.transpose(1, 2).flatten(-2)))
        # Squared ReLU learns as well as GELU, which alone takes a sixth of a step on a CPU. Source: So et al., 2021.
        hidden = self.feed_forward_in(self.feed_forward_norm(x_BTD)).relu().square()
        x_BTD = x_BTD + self.dropout(self.feed_forward_out(hidden))
        return x_BTD


class Transformer(nn.Module):
    """A decoder-only transformer; the output layer shares its weight with the embedding."""

    def __init__(self, num_tokens: int, task: CharLM) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(num_tokens, task.dim)
        self.position_embedding = nn.Embedding(task.context, task.dim)
        self.dropout = nn.Dropout(task.dropout)
        self.blocks = nn.ModuleList(Block(task.dim, task.num_heads, task.dropout) for _ in range(task.num_layers))
        self.norm = nn.LayerNorm(task.dim)
        self.head = nn.Linear(task.dim, num_tokens, bias=False)
        self._initialize(0.02 / math.sqrt(2 * task.num_layers))
        self.head.weight = self.token_embedding.weight

    def _initialize(self, residual_std: float) -> None:
        # Each of the 2 * num_layers additions to the residual stream starts small, so that their sum keeps
        # its scale at every depth. Source: Radford et al., 2019, section 2.3.
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=residual_std if name.endswith("_out.weight") else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, T, V) of the character after each position."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.dropout(self.token_embedding(tokens_BT) + self.position_embedding(positions_T))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: torch.Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CharLM(Task):
    """Predict the next character; the fields are the ``params`` of the spec.

    As they stand the model has 0.2 million parameters; ``dim=384, num_layers=6, num_heads=6, context=256`` makes
    10.8 million.
    """

    dim: PositiveInt = 96
    """Width of the model; a multiple of ``num_heads``."""

    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 3

    context: PositiveInt = 32
    """Characters the model reads at most; those of one sample."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    lr: PositiveFloat = 3e-3
    """Learning rate at its peak."""

    warmup_steps: NonNegativeInt = 20
    """Steps over which the learning rate rises from 0 to its peak."""

    decay_steps: PositiveInt = 300
    """Step at which it has fallen to a tenth, and stays there; usually the ``steps`` of the job."""

    weight_decay: NonNegativeFloat = 0.1

    def __post_init__(self) -> None:
        """Refuse parameters that contradict each other."""
        if self.dim % self.num_heads:
            raise ValueError(f"need dim to be a multiple of num_heads, got dim {self.dim}, num_heads {self.num_heads}")
        if self.warmup_steps >= self.decay_steps:
            raise ValueError(
                f"need warmup_steps < decay_steps, got warmup_steps {self.warmup_steps} >= {self.decay_steps}"
            )

    def build_model(self) -> nn.Module:
        """Return the transformer, freshly initialized."""
        return Transformer(len(load_text().vocabulary), self)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW, with weight decay on matrices only."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.99))

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """Return a linear warm-up followed by a cosine decay."""
        return LambdaLR(optimizer, self.lr_scale)

    def lr_scale(self, step: int) -> float:
        """Return the share of the peak learning rate that applies at ``step``, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))

    def train_data(self) -> Windows:
        """Return a window for every position of the training text: an epoch reads each character ``context`` times."""
        return Windows(load_text().train_N, self.context, stride=1)

    def eval_data(self) -> Windows:
        """Return windows that do not overlap, so that each character of the evaluation text counts once."""
        return Windows(load_text().eval_N, self.context, stride=self.context)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
        """Return the cross-entropy for each character, in nats."""
        tokens_BT, targets_BT = batch
        return Loss(_cross_entropy(model(tokens_BT), targets_BT), targets_BT.numel())

    def evaluate(
        self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
    ) -> Mapping[str, tuple[torch.Tensor, float]]:
        """Return the cross-entropy in nats and in bits, and how often the likeliest character was right."""
        tokens_BT, targets_BT = batch
        logits_BTV = model(tokens_BT)
        nats = _cross_entropy(logits_BTV, targets_BT, reduction="sum")
        num_right = (logits_BTV.argmax(dim=-1) == targets_BT).sum()
        num_tokens = float(targets_BT.numel())
        return {
            "loss": (nats, num_tokens),
            "bits_per_char": (nats / math.log(2), num_tokens),
            "accuracy": (num_right, num_tokens),
        }


def _cross_entropy(logits_BTV: torch.Tensor, targets_BT: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction=reduction)
