"""The small transformer against an independent one made of torch's own parts, and the names that checkpoints have."""

import math
import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from generators import architecture
from generators.architecture import SmallTransformer, flatten, parameter_count, tensor_table, unflatten
from generators.errors import InputError

ENCODER = [
    f"encoder.{block}.{name}"
    for block in (0, 1)
    for name in (
        "attention.queries.weight",
        "attention.keys.weight",
        "attention.values.weight",
        "attention.out_projection.weight",
        "fc1.weight",
        "fc1.bias",
        "fc2.weight",
        "fc2.bias",
    )
]
CLASSIFIER = ["classifier.fc1.weight", "classifier.fc1.bias", "classifier.fc2.weight", "classifier.fc2.bias"]
TASKS = ("mnist", "ag_news")


def random_tensors(task: str, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randn(spec.shape, generator=generator, dtype=torch.float64) * 0.3
        for spec in tensor_table(task)
    }


def make_model(task: str, tensors: dict[str, Tensor], vectors: Tensor | None = None, **options) -> SmallTransformer:
    model = SmallTransformer(task, vectors, **options).double()
    model.load_tensors(tensors)
    return model.eval()


def positions(tokens: int) -> Tensor:
    """The encoding of "Attention Is All You Need", entry by entry."""
    rows = [
        [(math.sin if j % 2 == 0 else math.cos)(t / 10000 ** (2 * (j // 2) / 32)) for j in range(32)]
        for t in range(tokens)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def reference_encoder(tensors: dict[str, Tensor], x: Tensor, masks: Sequence[Tensor] | None = None) -> Tensor:
    """Logits from embedded tokens [B, T, 32], with torch's attention, which knows neither our heads nor our layout."""
    keep = list(masks) if masks is not None else [torch.ones(())] * 5
    x = x * keep[0]
    for block in (0, 1):
        weights = {name: tensors[f"encoder.{block}.{name}"] for name in ("fc1.weight", "fc1.bias")}
        attention = torch.nn.MultiheadAttention(32, 2, bias=False, batch_first=True, dtype=torch.float64)
        names = [f"encoder.{block}.attention.{name}.weight" for name in ("queries", "keys", "values", "out_projection")]
        q, k, v, out = (tensors[name] for name in names)
        attention.load_state_dict({"in_proj_weight": torch.cat([q, k, v]), "out_proj.weight": out})
        normal = torch.nn.LayerNorm(32, elementwise_affine=False)(x)
        x = attention(normal, normal, normal, need_weights=False)[0] * keep[1 + 2 * block]
        hidden = F.relu(
            F.linear(torch.nn.LayerNorm(32, elementwise_affine=False)(x), weights["fc1.weight"], weights["fc1.bias"])
        )
        x = F.linear(hidden, tensors[f"encoder.{block}.fc2.weight"], tensors[f"encoder.{block}.fc2.bias"])
        x = x * keep[2 + 2 * block]
    pooled = torch.nn.LayerNorm(32, elementwise_affine=False)(x).mean(dim=1)
    hidden = F.relu(F.linear(pooled, tensors["classifier.fc1.weight"], tensors["classifier.fc1.bias"]))
    return F.linear(hidden, tensors["classifier.fc2.weight"], tensors["classifier.fc2.bias"])


def reference_images(tensors: dict[str, Tensor], images: Tensor) -> Tensor:
    patches = F.conv2d(images, tensors["embedding.conv1.weight"], tensors["embedding.conv1.bias"], stride=4)
    return patches.flatten(2).transpose(1, 2) + positions(49)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1


@pytest.fixture
def vectors() -> Tensor:
    return torch.randn(30, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 30, (6, 9), generator=torch.Generator().manual_seed(3))


def test_parameter_counts():
    assert parameter_count("mnist") == 18_506
    assert parameter_count("ag_news") == 17_764
    for task, vectors in (("mnist", None), ("ag_news", torch.zeros(3, 32))):
        model = SmallTransformer(task, vectors)
        assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(task)


def test_state_dict_names_are_those_of_the_release():
    embedding = ["embedding.pos_embedding", "embedding.conv1.weight", "embedding.conv1.bias"]
    assert set(SmallTransformer("mnist").state_dict()) == {*embedding, *ENCODER, *CLASSIFIER}
    assert list(SmallTransformer("ag_news", torch.zeros(3, 32)).state_dict()) == [*ENCODER, *CLASSIFIER]


def test_table_lists_names_shapes_and_components_in_order():
    table = tensor_table("mnist")
    assert [spec.name for spec in table] == ["embedding.conv1.weight", "embedding.conv1.bias", *ENCODER, *CLASSIFIER]
    assert [spec.name for spec in tensor_table("ag_news")] == [*ENCODER, *CLASSIFIER]
    shapes = {spec.name: spec.shape for spec in table}
    assert shapes["embedding.conv1.weight"] == (32, 1, 4, 4)
    assert shapes["encoder.1.fc1.weight"] == (64, 32)
    assert shapes["encoder.1.fc2.weight"] == (32, 64)
    assert shapes["classifier.fc2.weight"] == (10, 32)
    assert {spec.name: spec.shape for spec in tensor_table("ag_news")}["classifier.fc2.bias"] == (4,)
    assert [spec.component for spec in table] == ["embedding"] * 2 + ["encoder"] * 16 + ["classifier"] * 4
    trained = {name: tuple(p.shape) for name, p in SmallTransformer("mnist").named_parameters()}
    assert trained == shapes


@pytest.mark.parametrize("task", TASKS)
def test_flat_weights_and_named_tensors_are_inverse(task: str):
    flat = torch.arange(3 * parameter_count(task)).view(3, -1)
    named = unflatten(task, flat)
    assert {name: tuple(t.shape[1:]) for name, t in named.items()} == {s.name: s.shape for s in tensor_table(task)}
    assert torch.equal(flatten(task, named), flat)
    assert torch.equal(flatten(task, unflatten(task, flat[0])), flat[0])
    first = tensor_table(task)[0]
    assert torch.equal(named[first.name].flatten(1), flat[:, : first.numel])


def test_positions_are_the_sinusoidal_encoding():
    torch.testing.assert_close(architecture.sinusoidal_positions(64).double(), positions(64), rtol=0, atol=1e-7)


def test_image_logits_equal_those_of_torchs_own_parts(images: Tensor):
    tensors = random_tensors("mnist")
    expected = reference_encoder(tensors, reference_images(tensors, images))
    # The stored encoding has float32 precision.
    torch.testing.assert_close(make_model("mnist", tensors)(images), expected, rtol=1e-5, atol=1e-5)


def test_text_logits_equal_those_of_each_text_alone_without_a_mask(vectors: Tensor, tokens: Tensor):
    tensors = random_tensors("ag_news")
    lengths = torch.tensor([9, 1, 4, 2, 9, 7])
    found = make_model("ag_news", tensors, vectors)(tokens, lengths)
    for i, length in enumerate(lengths.tolist()):
        expected = reference_encoder(tensors, vectors[tokens[i : i + 1, :length]] + positions(length))
        torch.testing.assert_close(found[i : i + 1], expected, rtol=1e-5, atol=1e-5)


def test_padding_changes_nothing(vectors: Tensor, tokens: Tensor):
    model = make_model("ag_news", random_tensors("ag_news"), vectors)
    lengths = torch.tensor([5, 1, 4, 2, 3, 5])
    expected = model(tokens, lengths)
    other = torch.where(torch.arange(9) < lengths[:, None], tokens, 29 - tokens)
    assert torch.equal(model(other, lengths), expected)
    torch.testing.assert_close(model(tokens[:, :5], lengths), expected, rtol=1e-12, atol=1e-13)
    longer = torch.cat([tokens, torch.full((6, 40), 7)], dim=1)
    torch.testing.assert_close(model(longer, lengths), expected, rtol=1e-12, atol=1e-13)


def test_padding_gets_no_gradient(vectors: Tensor, tokens: Tensor):
    """Trained weights do not see padding either: gradients equal those of the shorter batch."""
    lengths = torch.tensor([5, 1, 4, 2, 3, 5])
    gradients = []
    for batch in (tokens, tokens[:, :5]):
        model = make_model("ag_news", random_tensors("ag_news"), vectors)
        F.cross_entropy(model(batch, lengths), torch.tensor([0, 1, 2, 3, 0, 1])).backward()
        gradients.append(flatten("ag_news", {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    assert gradients[0].isfinite().all()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-14)


def test_masks_act_behind_embedding_attention_and_mlp(images: Tensor):
    tensors = random_tensors("mnist")
    masks = torch.rand(5, 5, 49, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    expected = reference_encoder(tensors, reference_images(tensors, images), masks)
    found = make_model("mnist", tensors)(images, dropout_masks=list(masks))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found - make_model("mnist", tensors)(images)).abs().max() > 1e-2


def test_dropout_is_torchs_in_training_mode_and_absent_otherwise(images: Tensor, monkeypatch):
    rates = []

    def counted(x: Tensor, rate: float, training: bool) -> Tensor:
        rates.append(rate if training else 0.0)
        return x

    monkeypatch.setattr(architecture.F, "dropout", counted)
    model = make_model("mnist", random_tensors("mnist"), dropout=0.15)
    model(images)
    model.train()(images)
    assert rates == [0.0] * 5 + [0.15] * 5


def test_head_i_has_rows_16i_to_16i_plus_15(images: Tensor):
    """Exchanging the heads as the paper's W_Q of head i = weight[16i : 16i + 16].T says changes nothing."""
    tensors = random_tensors("mnist")
    order = torch.cat([torch.arange(16, 32), torch.arange(16)])
    swapped = dict(tensors)
    for name in ("queries", "keys", "values"):
        swapped[f"encoder.0.attention.{name}.weight"] = tensors[f"encoder.0.attention.{name}.weight"][order]
    half_done = make_model("mnist", swapped)(images)
    out = "encoder.0.attention.out_projection.weight"
    swapped[out] = tensors[out][:, order]
    expected = make_model("mnist", tensors)(images)
    torch.testing.assert_close(make_model("mnist", swapped)(images), expected, rtol=1e-12, atol=1e-12)
    assert (half_done - expected).abs().max() > 1e-3


def test_tensors_that_do_not_fit_are_refused_by_name():
    tensors = random_tensors("mnist")
    model = SmallTransformer("mnist")
    model.load_tensors(tensors | {"embedding.pos_embedding": torch.zeros(49, 32)})
    assert torch.equal(model.embedding.pos_embedding, architecture.sinusoidal_positions(49))
    missing = {name: tensor for name, tensor in tensors.items() if name != "classifier.fc1.bias"}
    for bad, message in (
        (missing, r"classifier\.fc1\.bias: found no tensor, expected \(32,\)"),
        (tensors | {"extra": torch.zeros(2)}, r"extra: found \(2,\), expected no tensor"),
        (
            tensors | {"encoder.0.fc1.weight": torch.zeros(32, 64)},
            r"fc1\.weight: found \(32, 64\), expected \(64, 32\)",
        ),
    ):
        with pytest.raises(InputError, match=message):
            model.load_tensors(bad)


@pytest.mark.parametrize(
    ("task", "vectors", "message"),
    [
        ("cifar", None, "task: found 'cifar', expected one of mnist, ag_news"),
        ("ag_news", None, "word_vectors: task ag_news needs word vectors"),
        ("mnist", torch.zeros(3, 32), "word_vectors: task mnist takes no word vectors"),
    ],
)
def test_impossible_models_are_refused(task: str, vectors: Tensor | None, message: str):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        SmallTransformer(task, vectors)
