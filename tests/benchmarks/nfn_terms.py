"""Transformer-NFN with every term of its layers as a contraction of its own over heads: the reference for speed.

Products W_Q W_K^T and W_V W_O are formed once a layer, head by head; each term is one einsum, results are added.
Letters: b sample, h head, c and e channel in and out, p and q summed coordinates, j and k the output's; "_" is a
dimension of size 1 that broadcasts. Coefficients lie as [e, c, (k or j), (p, q)].
"""

from copy import deepcopy

import torch
from torch import Tensor, nn

from zoo.nfn.data import component_tensors
from zoo.nfn.predictors.transformer_nfn import TransformerNFN
from zoo.nfn.weight_space import encoder_weights, split_columns, split_rows

HEADS = 2
Terms = dict[str, tuple[str, str | None]]


def pooled_terms(to: str, k: str) -> Terms:
    """Terms that read the whole block; `to` are the output's dimensions, `k` the coordinate of the coefficients."""
    return {
        "qk": (f"ec{k}pq,bchpq->{to}", "qk"),
        "vo_rows": (f"ec{k}p,bchpq->{to}", "vo"),
        "a_sum": (f"ec{k},bcpq->{to}", "a"),
        "b_columns": (f"ec{k}q,bcpq->{to}", "b"),
        "a_bias_sum": (f"ec{k},bcq->{to}", "a_bias"),
        "b_bias": (f"ec{k}q,bcq->{to}", "b_bias"),
        "bias": (f"e{k}->{to[1:]}", None),
    }


EQUIVARIANT: dict[str, Terms] = {
    "q": {"q": ("ecjp,bchpk->behjk", "q")},
    "k": {"k": ("ecjp,bchpk->behjk", "k")},
    "v": {"v": ("ecjp,bchpk->behjk", "v")},
    "o": {"o_row": ("ec,bchjq->behj_", "o"), "o_entry": ("ec,bchjk->behjk", "o")},
    "a": pooled_terms("be__", "")
    | {
        "vo_column": ("ecp,bchpj->bej_", "vo"),
        "a_row": ("ec,bcjq->bej_", "a"),
        "a_column": ("ec,bcpk->be_k", "a"),
        "a_entry": ("ec,bcjk->bejk", "a"),
        "b_row": ("ecq,bckq->be_k", "b"),
        "a_bias_entry": ("ec,bck->be_k", "a_bias"),
    },
    "a_bias": pooled_terms("be_", "")
    | {
        "a_column": ("ec,bcpk->bek", "a"),
        "b_row": ("ecq,bckq->bek", "b"),
        "a_bias_entry": ("ec,bck->bek", "a_bias"),
    },
    "b": pooled_terms("be_k", "k")
    | {
        "a_column": ("eck,bcpj->bejk", "a"),
        "b_row": ("eckq,bcjq->bejk", "b"),
        "a_bias_entry": ("eck,bcj->bejk", "a_bias"),
    },
    "b_bias": pooled_terms("bek", "k"),
}


class TermSum(nn.Module):
    """A sum of terms. coefficients: by term, [e, c, ...]."""

    def __init__(self, terms: Terms, coefficients: dict[str, Tensor]) -> None:
        super().__init__()
        self.terms = terms
        self.coefficients = nn.ParameterList(coefficients[name].clone() for name in terms)

    def forward(self, weights: dict[str, Tensor]) -> Tensor:
        values = zip(self.terms.values(), self.coefficients, strict=True)
        return sum(term(equation, w, None if read is None else weights[read]) for (equation, read), w in values)


def term(equation: str, coefficients: Tensor, read: Tensor | None) -> Tensor:
    """Evaluate one term; a bias reads nothing and is the same for all samples."""
    left, right = equation.split("->")
    operands = [coefficients] if read is None else [coefficients, read]
    value = torch.einsum(f"{left}->{right.replace('_', '')}", *operands)
    for place, letter in enumerate(right):
        if letter == "_":
            value = value.unsqueeze(place)
    return value if read is not None else value.unsqueeze(0)


def with_products(w: dict[str, Tensor]) -> dict[str, Tensor]:
    qk = torch.einsum("bchpk,bchqk->bchpq", w["q"], w["k"])
    return w | {"qk": qk, "vo": torch.einsum("bchpk,bchkq->bchpq", w["v"], w["o"])}


class PlainNFN(nn.Module):
    """The function of a TransformerNFN of one layer, term by term, with copies of its parameters."""

    def __init__(self, network: TransformerNFN) -> None:
        super().__init__()
        encoder = network.parts["encoder"]
        equivariant, invariant = encoder.equivariant[0].coefficients(), encoder.invariant.coefficients()
        blocks = range(len(encoder.norm))
        self.equivariant = nn.ModuleList(
            nn.ModuleDict(
                {f"to_{name}": TermSum(terms, _block(equivariant, name, i)) for name, terms in EQUIVARIANT.items()}
            )
            for i in blocks
        )
        self.invariant = nn.ModuleList(
            TermSum(pooled_terms("be", ""), {name: value[i].detach() for name, value in invariant.items()})
            for i in blocks
        )
        self.norm, self.mix = deepcopy(encoder.norm), deepcopy(encoder.mix)
        self.classifier, self.embedding = deepcopy(network.parts["classifier"]), deepcopy(network.parts["embedding"])
        self.head = deepcopy(network.head)

    def forward(self, blocks: list[dict[str, Tensor]], classifier: Tensor, embedding: Tensor) -> Tensor:
        features = []
        for weights, equivariant, invariant, norm in zip(
            blocks, self.equivariant, self.invariant, self.norm, strict=True
        ):
            read = with_products(weights)
            output = {name: equivariant[f"to_{name}"](read) for name in EQUIVARIANT}
            output |= {name: output[name].relu() for name in ("a", "a_bias", "b", "b_bias")}
            features.append(norm(invariant(with_products(output))))
        parts = [self.embedding(embedding), self.mix(torch.cat(features, dim=1)), self.classifier(classifier)]
        return self.head(torch.cat(parts, dim=1)).squeeze(1)


def _block(coefficients: dict[str, Tensor], output: str, block: int) -> dict[str, Tensor]:
    """Coefficients of one output and block; [e, k, c, ...] becomes [e, c, k, ...]."""
    by_coordinate = output in ("q", "k", "v", "b", "b_bias")
    found = {}
    for name, value in coefficients.items():
        to, source = name.split(".")
        if to == output:
            own = value[block].detach()
            found[source] = own.transpose(1, 2) if by_coordinate and source != "bias" else own
    return found


def plain_inputs(network: TransformerNFN, flat: Tensor) -> tuple[list[dict[str, Tensor]], Tensor, Tensor]:
    """What PlainNFN reads, from flat weights [N, P]: scaled like the network's own inputs, heads apart."""
    parts = dict(zip(network.components, (flat * network.scale).split(network.sizes, dim=1), strict=True))
    weights = encoder_weights(component_tensors(network.task, "encoder", parts["encoder"]))
    split = dict.fromkeys(("q", "k", "v"), split_columns) | {"o": split_rows}
    blocks = [
        {
            name: (split[name](value[i], HEADS) if name in split else value[i]).unsqueeze(1).contiguous()
            for name, value in vars(weights).items()
        }
        for i in range(len(weights.q))
    ]
    return blocks, parts["classifier"], parts["embedding"]
