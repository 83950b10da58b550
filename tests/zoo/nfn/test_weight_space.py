"""Weight space and group: layout, action, and the function of a trained transformer before and after."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from weight_tools import ILLEGAL, SMALL, SPACES, largest_difference, random_weights

from generators.architecture import SmallTransformer, tensor_table
from zoo.nfn.weight_space import (
    WeightSpace,
    apply_group,
    encoder_tensors,
    encoder_weights,
    sample_group,
    split_columns,
    split_rows,
)


def element_of(space: WeightSpace, leading: tuple[int, ...], seed: int = 1):
    return sample_group(space, (space.blocks, *leading), torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def trained() -> dict[str, Tensor]:
    """A transformer after 40 steps of Adam on ten noisy patterns, in float64."""
    torch.manual_seed(0)
    model = SmallTransformer("mnist").double()
    for parameter in model.parameters():
        torch.nn.init.trunc_normal_(parameter, 0, 0.2, -2, 2)
    patterns = torch.rand(10, 1, 28, 28, dtype=torch.float64) * 2 - 1
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(40):
        labels = torch.randint(0, 10, (32,))
        loss = F.cross_entropy(model(patterns[labels] + 0.3 * torch.randn(32, 1, 28, 28)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: tensor for name, tensor in model.state_dict().items() if name != "embedding.pos_embedding"}


def logits(tensors: dict[str, Tensor]) -> Tensor:
    model = SmallTransformer("mnist").double()
    model.load_tensors(tensors)
    images = torch.rand(8, 1, 28, 28, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    with torch.no_grad():
        return model(images * 2 - 1)


def test_layout_is_that_of_the_state_dict(trained: dict[str, Tensor]):
    weights = encoder_weights(trained)
    head = split_columns(weights.q[1], 2)[1]
    assert torch.equal(head, trained["encoder.1.attention.queries.weight"][16:32].T)
    assert torch.equal(split_rows(weights.o[0], 2)[1], trained["encoder.0.attention.out_projection.weight"].T[16:32])
    assert torch.equal(weights.a[0], trained["encoder.0.fc1.weight"].T)
    back = encoder_tensors(weights)
    names = [spec.name for spec in tensor_table("mnist") if spec.component == "encoder"]
    assert sorted(back) == sorted(names)
    assert all(torch.equal(back[name], trained[name]) for name in names)


def test_stacked_checkpoints_keep_their_order():
    stacked = {
        spec.name: torch.arange(3.0).reshape(3, *[1] * len(spec.shape)).expand(3, *spec.shape)
        for spec in tensor_table("ag_news")
    }
    weights = encoder_weights(stacked)
    assert weights.b.shape == (2, 3, 64, 32)
    assert weights.k[1, 2].unique().tolist() == [2.0]


@pytest.mark.parametrize("space", SPACES)
def test_action_is_that_of_the_paper(space: WeightSpace):
    """Against permutation matrices and inverses, head by head."""
    weights, g = random_weights(space, (1,)), element_of(space, (1,))
    moved = apply_group(g, weights)
    for block in range(space.blocks):
        p_o, p_a = (torch.eye(len(order[block, 0])).double()[:, order[block, 0]] for order in (g.out, g.hidden))
        q, k, v = (split_columns(x[block, 0], space.heads) for x in (weights.q, weights.k, weights.v))
        q2, k2, v2 = (split_columns(x[block, 0], space.heads) for x in (moved.q, moved.k, moved.v))
        o, o2 = (split_rows(x.o[block, 0], space.heads) for x in (weights, moved))
        for head, source in enumerate(g.heads[block, 0].tolist()):
            m, n = g.m[block, 0, source], g.n[block, 0, source]
            torch.testing.assert_close(q2[head], q[source] @ m.T)
            torch.testing.assert_close(k2[head], k[source] @ torch.linalg.inv(m))
            torch.testing.assert_close(v2[head], v[source] @ n)
            torch.testing.assert_close(o2[head], torch.linalg.inv(n) @ o[source] @ p_o)
        torch.testing.assert_close(moved.a[block, 0], p_o.T @ weights.a[block, 0] @ p_a)
        torch.testing.assert_close(moved.a_bias[block, 0], weights.a_bias[block, 0] @ p_a)
        torch.testing.assert_close(moved.b[block, 0], p_a.T @ weights.b[block, 0])
        torch.testing.assert_close(moved.b_bias[block, 0], weights.b_bias[block, 0])


@pytest.mark.parametrize("seed", range(3))
def test_trained_transformer_is_the_same_function_after_a_move(trained: dict[str, Tensor], seed: int):
    moved = trained | encoder_tensors(apply_group(element_of(WeightSpace(), (), seed), encoder_weights(trained)))
    name = "encoder.0.attention.keys.weight"
    assert (moved[name] - trained[name]).abs().max() > 0.1
    before, after = logits(trained), logits(moved)
    assert before.std() > 0.1
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("illegal", ILLEGAL)
def test_trained_transformer_is_another_function_after_other_moves(trained: dict[str, Tensor], illegal):
    moved = trained | encoder_tensors(illegal(encoder_weights(trained), 2))
    assert (logits(moved) - logits(trained)).abs().max() > 1e-3


def test_single_precision_keeps_the_products():
    space = WeightSpace()
    weights = random_weights(space, (5,)).map(Tensor.float)
    element = sample_group(space, (space.blocks, 5), torch.Generator().manual_seed(0))
    moved = apply_group(element, weights)
    products, moved_products = (w.q @ w.k.mT for w in (weights, moved))
    assert (moved_products - products).abs().max() / products.abs().max() < 1e-5


def test_drawn_matrices_are_well_conditioned_and_differ():
    element = sample_group(
        SMALL, (SMALL.blocks, 50), torch.Generator().manual_seed(0), condition=4.0, dtype=torch.float64
    )
    for matrices in (element.m, element.n):
        s = torch.linalg.svdvals(matrices)
        assert (s[..., 0] / s[..., -1]).max() < 4.0
        assert 0.5 <= s.min() < 0.7 and 1.4 < s.max() <= 2.0
    assert element.hidden.sort(-1).values.unique(dim=1).shape[1] == 1
    assert len(element.hidden[0].unique(dim=0)) > 25
    assert element.heads.float().mean().item() == pytest.approx(0.5)


def test_relu_touches_the_mlp_alone():
    weights = random_weights(SMALL, (2,))
    rectified = weights.relu_mlp()
    assert torch.equal(rectified.q, weights.q) and torch.equal(rectified.o, weights.o)
    assert all((getattr(rectified, name) >= 0).all() for name in ("a", "a_bias", "b", "b_bias"))
    assert largest_difference(rectified, weights) > 0.1
