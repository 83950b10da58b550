"""The small transformer of "Equivariant Neural Functional Networks for Transformers" (ICLR 2025, arXiv 2410.04209), and
the table of its tensors.

Two blocks, two heads, width 32; no residual connections, LayerNorm without affine parameters, attention without
biases. Tensors keep nn.Linear's layout, so W_Q of head i in the paper's row-vector convention is
`queries.weight[16 * i : 16 * i + 16].T`. state_dict names equal those of the authors' release.

Dimensions: B sample, T token, D width, H head, K width of a head, C class, P parameter.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from generators.errors import InputError

WIDTH = 32
HEADS = 2
HEAD_WIDTH = WIDTH // HEADS
MLP_WIDTH = 64
BLOCKS = 2
PATCH = 4
IMAGE = 28
IMAGE_TOKENS = (IMAGE // PATCH) ** 2
DROPOUT_SITES = 1 + 2 * BLOCKS
CLASSES = {"mnist": 10, "ag_news": 4}
COMPONENTS = ("embedding", "encoder", "classifier")
Dropout = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TensorSpec:
    """One trained tensor: its state_dict name, its shape, and the component (embedding, encoder, classifier)."""

    name: str
    shape: tuple[int, ...]

    @property
    def component(self) -> str:
        return self.name.split(".", 1)[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def tensor_table(task: str) -> tuple[TensorSpec, ...]:
    """Return the trained tensors of a task's transformer in state_dict order (MNIST 18,506 numbers, AG News 17,764)."""
    if task not in CLASSES:
        raise InputError(f"task: found {task!r}, expected one of {', '.join(CLASSES)}")
    return _TENSORS[task]


def _tensors(task: str) -> tuple[TensorSpec, ...]:
    rows: list[tuple[str, tuple[int, ...]]] = []
    if task == "mnist":
        rows += [("embedding.conv1.weight", (WIDTH, 1, PATCH, PATCH)), ("embedding.conv1.bias", (WIDTH,))]
    for block in range(BLOCKS):
        for name in ("queries", "keys", "values", "out_projection"):
            rows.append((f"encoder.{block}.attention.{name}.weight", (WIDTH, WIDTH)))
        rows += [(f"encoder.{block}.fc1.weight", (MLP_WIDTH, WIDTH)), (f"encoder.{block}.fc1.bias", (MLP_WIDTH,))]
        rows += [(f"encoder.{block}.fc2.weight", (WIDTH, MLP_WIDTH)), (f"encoder.{block}.fc2.bias", (WIDTH,))]
    rows += [("classifier.fc1.weight", (WIDTH, WIDTH)), ("classifier.fc1.bias", (WIDTH,))]
    rows += [("classifier.fc2.weight", (CLASSES[task], WIDTH)), ("classifier.fc2.bias", (CLASSES[task],))]
    return tuple(TensorSpec(name, shape) for name, shape in rows)


_TENSORS = {task: _tensors(task) for task in CLASSES}


def parameter_count(task: str) -> int:
    return sum(spec.numel for spec in tensor_table(task))


def flatten(task: str, tensors: dict[str, Tensor]) -> Tensor:
    """Join named tensors [..., *shape] to one [..., P] in the order of the tensor table."""
    parts = [tensors[spec.name] for spec in tensor_table(task)]
    leading = parts[0].dim() - len(tensor_table(task)[0].shape)
    return torch.cat([part.flatten(leading) for part in parts], dim=-1)


def unflatten(task: str, flat: Tensor) -> dict[str, Tensor]:
    """Split [..., P] into named views [..., *shape]; the inverse of `flatten`."""
    table = tensor_table(task)
    parts = flat.split([spec.numel for spec in table], dim=-1)
    return {
        spec.name: part.unflatten(-1, spec.shape) if len(spec.shape) > 1 else part
        for spec, part in zip(table, parts, strict=True)
    }


def sinusoidal_positions(tokens: int, width: int = WIDTH) -> Tensor:
    """Return the fixed positional encoding [tokens, width]: base 10000, sine on even channels, cosine on odd ones."""
    position = torch.arange(tokens, dtype=torch.float64)[:, None]
    frequency = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10000.0) / width))
    table = torch.empty(tokens, width, dtype=torch.float64)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency)
    return table.float()


class ImageEmbedding(nn.Module):
    """Images [B, 1, 28, 28] to tokens [B, 49, D]: one 4x4 patch a token, row by row."""

    pos_embedding: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.register_buffer("pos_embedding", sinusoidal_positions(IMAGE_TOKENS))

    def forward(self, images: Tensor) -> Tensor:
        side = IMAGE // PATCH
        patches = images.reshape(-1, side, PATCH, side, PATCH).transpose(2, 3).reshape(-1, side * side, PATCH * PATCH)
        # The convolution does not overlap, so it is a linear map of patches, which batches over stacked weights.
        return F.linear(patches, self.conv1.weight.flatten(1), self.conv1.bias) + self.pos_embedding


class WordEmbedding(nn.Module):
    """Token ids [B, T] to frozen word vectors plus positions, [B, T, D]. Nothing in it is trained or saved."""

    word_vectors: Tensor
    pos_embedding: Tensor

    def __init__(self, word_vectors: Tensor, max_tokens: int) -> None:
        super().__init__()
        self.register_buffer("word_vectors", word_vectors, persistent=False)
        self.register_buffer("pos_embedding", sinusoidal_positions(max_tokens), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.word_vectors[tokens] + self.pos_embedding[: tokens.shape[1]]


class Attention(nn.Module):
    """Multi-head self-attention without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(WIDTH, WIDTH, bias=False)
        self.keys = nn.Linear(WIDTH, WIDTH, bias=False)
        self.values = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out_projection = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """x [B, T, D]; `valid` [B, T] is False at padding, which no token attends to. Returns [B, T, D]."""
        q, k, v = (split_heads(linear(x)) for linear in (self.queries, self.keys, self.values))
        scores = (q / math.sqrt(HEAD_WIDTH)) @ k.transpose(-1, -2)
        if valid is not None:
            scores = scores.masked_fill(~valid[:, None, None, :], -torch.inf)
        heads = torch.softmax(scores, dim=-1) @ v
        return self.out_projection(heads.transpose(1, 2).flatten(2))


def split_heads(x: Tensor) -> Tensor:
    """[B, T, D] to [B, H, T, K]; head i holds channels 16 * i to 16 * i + 15."""
    return x.unflatten(-1, (HEADS, HEAD_WIDTH)).transpose(-2, -3)


class Block(nn.Module):
    """LayerNorm, attention, dropout, LayerNorm, two-layer ReLU network, dropout; no residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.fc1 = nn.Linear(WIDTH, MLP_WIDTH)
        self.fc2 = nn.Linear(MLP_WIDTH, WIDTH)

    def forward(self, x: Tensor, valid: Tensor | None, drop_attention: Dropout, drop_mlp: Dropout) -> Tensor:
        x = drop_attention(self.attention(normalise(x), valid))
        return drop_mlp(self.fc2(F.relu(self.fc1(normalise(x)))))


class Classifier(nn.Module):
    """Pooled features [B, D] to logits [B, C]."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, WIDTH)
        self.fc2 = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class SmallTransformer(nn.Module):
    """The transformer of one run.

    Args:
        task: "mnist" or "ag_news".
        word_vectors: frozen embedding [V, 32] (AG News only); row 0 is padding and unknown words.
        max_tokens: longest text that the model accepts (AG News only).
        dropout: rate used in training mode, in [0, 1).
    """

    def __init__(
        self, task: str, word_vectors: Tensor | None = None, max_tokens: int = 512, dropout: float = 0.0
    ) -> None:
        super().__init__()
        tensor_table(task)  # refuses an unknown task
        if (task == "ag_news") != (word_vectors is not None):
            raise InputError(f"word_vectors: task {task} {'needs' if task == 'ag_news' else 'takes no'} word vectors")
        self.task = task
        self.dropout = dropout
        self.embedding = ImageEmbedding() if word_vectors is None else WordEmbedding(word_vectors, max_tokens)
        self.encoder = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.classifier = Classifier(CLASSES[task])

    def forward(
        self, inputs: Tensor, lengths: Tensor | None = None, dropout_masks: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Return logits [B, C].

        Args:
            inputs: MNIST images [B, 1, 28, 28] scaled to [-1, 1], or AG News token ids [B, T].
            lengths: number of real tokens of each text, [B], 1 or more; tokens behind it are ignored. Without them all
                T count, padding too, as in the paper's own code; this zoo's models are trained with them.
            dropout_masks: for each of the five sites a factor [B, T, D] (0 or 1 / (1 - rate)) that replaces torch's own
                dropout. Sites: embedding; then, in each block, attention and MLP.
        """
        drops: list[Dropout] = [self._random_dropout] * DROPOUT_SITES
        if dropout_masks is not None:
            drops = [mask.__mul__ for mask in dropout_masks]
        valid = None
        if lengths is not None:
            valid = torch.arange(inputs.shape[1], device=inputs.device) < lengths[:, None]
        x = drops[0](self.embedding(inputs))
        for i, block in enumerate(self.encoder):
            x = block(x, valid, drops[1 + 2 * i], drops[2 + 2 * i])
        x = normalise(x)
        if lengths is None or valid is None:
            return self.classifier(x.mean(dim=1))
        return self.classifier((x * valid[..., None]).sum(dim=1) / lengths[:, None])

    def _random_dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Load the tensors of the tensor table; fixed buffers keep their values, other names are refused."""
        expected = {spec.name: spec.shape for spec in tensor_table(self.task)}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name != "embedding.pos_embedding"}
        for name in expected.keys() | found.keys():
            if expected.get(name) != found.get(name):
                raise InputError(
                    f"{name}: found {found.get(name, 'no tensor')}, expected {expected.get(name, 'no tensor')} "
                    f"in a checkpoint of task {self.task}"
                )
        self.load_state_dict({name: tensors[name] for name in expected}, strict=False)


def normalise(x: Tensor) -> Tensor:
    """LayerNorm over the width, without affine parameters, eps 1e-5."""
    return F.layer_norm(x, (WIDTH,))
