"""The larger modules of torch.nn: recurrent ones, attention, transformers, parametrizations, convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.distributed.cases.stage3_cases import WIDTH, Case, batch, case, cases, loss_of, tokens


class _Library(Case):
    """Training, and evaluation before it: there attention and its layers have fast paths of other bits, which they do
    not take where modules have hooks, as at stage 3."""

    @staticmethod
    def step(engine: Any, step: int) -> Tensor:
        with torch.no_grad():
            engine.module.evaluations.append(loss_of(engine.eval()(batch(step))).item())
        return loss_of(engine.train()(batch(step)))


@cases(
    lstm=lambda: nn.LSTM(WIDTH, 7, 2, batch_first=True, bidirectional=True, dropout=0.2),
    projected=lambda: nn.LSTM(WIDTH, 7, proj_size=3),
    gru=lambda: nn.GRU(WIDTH, 5, 2, bias=False),
    rnn=lambda: nn.RNN(WIDTH, 5),
)
class Recurrent(_Library):
    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.recurrent = nn.Linear(WIDTH, WIDTH), build()

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.recurrent(self.first(x))
        return y.sum(-1) + (state[0] if isinstance(state, tuple) else state).sum()


@case
class RecurrentCell(_Library):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for index in range(x.shape[1]):
            state = self.cell(x[:, index], state)
        return self.head(state[0])


@cases(joint={}, separate={"kdim": WIDTH, "vdim": WIDTH, "add_bias_kv": True, "bias": False})
class Attention(_Library):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y, weights = self.attention(x, x, x, need_weights=not self.training)
        return y if weights is None else y * weights.sum()


def _encoder(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, 10, batch_first=True, **options)


@cases(
    after=lambda: nn.TransformerEncoder(_encoder(), 2),
    before=lambda: nn.TransformerEncoder(
        _encoder(norm_first=True, activation="gelu"), 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False
    ),
)
class Encoder(_Library):
    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.encoder = nn.Linear(WIDTH, WIDTH), build()

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1]).expand(x.shape[:2]) > torch.tensor([[3], [4]])
        return self.encoder(self.first(x), src_key_padding_mask=padding)[:, :3]


@case
class EncoderDecoder(_Library):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 10, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.transformer(x, x.flip(1))


@cases(sum="sum", mean="mean", max="max")
class Bags(Case):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(13, WIDTH, mode=mode), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids))

    @staticmethod
    def step(engine: Any, step: int) -> Tensor:
        return loss_of(engine(tokens(step)))


@cases(
    weight_norm=parametrizations.weight_norm,
    spectral_norm=parametrizations.spectral_norm,
    orthogonal=parametrizations.orthogonal,
    old_spectral_norm=nn.utils.spectral_norm,
)
class Parametrized(_Library):
    def __init__(self, parametrize: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.one = parametrize(nn.Linear(WIDTH, WIDTH))
        self.two = parametrize(nn.Linear(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x))) @ self.two.weight


@case
class ConvNet(_Library):
    """A convolutional net without batch statistics, in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 5, 3, padding=1),
            nn.GroupNorm(1, 5),
            nn.PReLU(5),
            nn.Conv2d(5, 10, 3, stride=2, groups=5),
            nn.ConvTranspose2d(10, 4, 2),
            nn.InstanceNorm2d(4, affine=True),
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    @staticmethod
    def step(engine: Any, step: int) -> Tensor:
        x = batch(step, 2, 3, 7, 7).to(memory_format=torch.channels_last)
        return loss_of(engine(x))
