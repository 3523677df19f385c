"""Loops as papers and libraries have them, with what their layers save kept, swapped and computed again."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import State, offloaded
from support.second_passes import Forced
from torch import func, nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

from hapi.offload import training
from hapi.offload.activations import swapper

STEPS = 8
Give = Callable[[nn.Module, torch.optim.Optimizer], Any]
"""Gives the optimizer to train with."""


def inputs(step: int) -> torch.Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(step))


class Net(nn.Module):
    def __init__(self, out: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 48), nn.Linear(48, out)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(48)) for _ in range(3)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows)
        for block in self.blocks:
            rows = rows + block(rows)
        found: torch.Tensor = self.last(rows)
        return found


def adamw(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for model in models for one in model.parameters()], lr=1e-2)


def loss(model: nn.Module, step: int) -> torch.Tensor:
    found: torch.Tensor = model(inputs(step)).float().tanh().square().mean()
    return found


def usual(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss(model, step).backward()
    optimizer.step()


def surgery(give: Give) -> State:
    """PCGrad: gradients of several losses, without what they have against each other."""
    model = Net()
    optimizer, trained = give(model, adamw(model)), list(model.parameters())
    for step in range(STEPS):
        out = model(inputs(step))
        found = []
        for one in (out.square().mean(), out.sin().mean()):
            optimizer.zero_grad()
            one.backward(retain_graph=True)
            found.append(torch.cat([parameter.grad.flatten() for parameter in trained]))
        first, second = found
        against = (first @ second).clamp(max=0.0)
        whole = first + second - against * (second / second.norm() ** 2 + first / first.norm() ** 2)
        parts = whole.split([parameter.numel() for parameter in trained])
        for parameter, part in zip(trained, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    return model.state_dict()


def lookahead(give: Give) -> State:
    model = Net()
    optimizer = give(model, adamw(model))
    slow = [one.detach().clone() for one in model.parameters()]
    for step in range(STEPS):
        usual(model, optimizer, step)
        for one, kept in zip(model.parameters(), slow, strict=True) if step % 5 == 4 else ():
            kept.lerp_(one.data, 0.5)
            one.data.copy_(kept)
    return model.state_dict()


def averaged(give: Give) -> State:
    """Stochastic weight averaging, with statistics computed at the end."""
    model = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))
    optimizer = give(model, adamw(model))
    average = swa_utils.AveragedModel(model)
    rates = swa_utils.SWALR(optimizer, 0.02, 3)
    for step in range(STEPS):
        usual(model, optimizer, step)
        average.update_parameters(model)
        rates.step()
    swa_utils.update_bn([inputs(step) for step in range(3)], average)
    return average.state_dict()


class LowRank(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.is_merged = inner.requires_grad_(False), False
        self.down, self.up = nn.Parameter(torch.randn(4, 48) / 9), nn.Parameter(torch.zeros(48, 4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(rows)
        return found if self.is_merged else found + rows @ self.down.t() @ self.up.t()

    def merge(self, sign: int) -> None:
        self.inner.weight.data += sign * (self.up @ self.down)
        self.is_merged = sign > 0


def low_rank(give: Give) -> State:
    """LoRA, merged into frozen weights for evaluation between backward and step."""
    model: Any = Net().requires_grad_(False)
    for block in model.blocks:
        block[0] = LowRank(block[0])
    optimizer = give(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step).backward()
        for sign in (1, -1):
            for block in model.blocks:
                block[0].merge(sign)
            with torch.no_grad():
                seen.append(loss(model, 99))
        optimizer.step()
    return {**model.state_dict(), "seen": torch.stack(seen)}


def adversarial(give: Give) -> State:
    """A generator's loss through a frozen critic, whose own backward comes between."""
    generator, critic = Net(12), nn.Sequential(nn.Linear(12, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    its, other = give(generator, adamw(generator)), give(critic, adamw(critic))
    for step in range(STEPS):
        made = generator(inputs(step))
        critic.requires_grad_(False)
        wanted = -critic(made).mean()
        critic.requires_grad_(True)
        other.zero_grad()
        (critic(made.detach()) - critic(inputs(50 + step))).mean().backward()
        its.zero_grad()
        wanted.backward()
        its.step()
        other.step()
    return {**generator.state_dict(), **{f"critic.{name}": one for name, one in critic.state_dict().items()}}


def bootstrapped(give: Give) -> State:
    """BYOL: a teacher that follows by ``.data``, and a predictor that the call does not name."""
    student, predictor = Net(24), nn.Linear(24, 24)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = give(student, adamw(student, predictor))
    for step in range(STEPS):
        optimizer.zero_grad()
        wanted = teacher(inputs(50 + step))
        (-functional.cosine_similarity(predictor(student(inputs(step))), wanted).mean()).backward()
        optimizer.step()
        for one, other in zip(teacher.parameters(), student.parameters(), strict=True):
            one.data = 0.9 * one.data + 0.1 * other.data
    return {**teacher.state_dict(), "predictor": predictor.weight.detach()}


def usually(model: nn.Module, give: Give) -> State:
    optimizer = give(model, adamw(model))
    for step in range(STEPS):
        usual(model, optimizer, step)
    return model.state_dict()


class Islands(Net):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            rows = self.first(rows)
            for number, block in enumerate(self.blocks):
                with torch.autocast("cpu", torch.bfloat16, enabled=number != 1):
                    rows = rows + block(rows.float() if number == 1 else rows)
        found: torch.Tensor = self.last(rows.float())
        return found


def islands(give: Give) -> State:
    return usually(Islands(), give)


class Tied(nn.Module):
    """Words whose embeddings are the last layer too, each part of it checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(50, 48, padding_idx=0), nn.LSTM(48, 48, batch_first=True)
        self.last = nn.Linear(48, 50, bias=False)
        self.last.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = checkpoint(self.inner, self.words(tokens), use_reentrant=True)[0]
        return checkpoint(self.last, found, use_reentrant=True)  # type: ignore[no-any-return]


def tied(give: Give) -> State:
    model = Tied()
    optimizer = give(model, adamw(model))
    for step in range(STEPS):
        tokens = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), ignore_index=0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model.state_dict()


def two_of_one(give: Give) -> State:
    """Two optimizers, each given with the whole model."""
    model: Any = nn.ModuleDict({"first": Net(12), "last": Net()})
    made = [give(model, adamw(model["first"])), give(model, adamw(model["last"]))]
    for step in range(STEPS):
        model.zero_grad()
        loss(nn.Sequential(model["first"], model["last"]), step).backward()
        for optimizer in made:
            optimizer.step()
    return model.state_dict()  # type: ignore[no-any-return]


def gradual(give: Give) -> State:
    """Layers are thawed one after the other, late ones too."""
    model = Net()
    optimizer = give(model, adamw(model))
    for step in range(STEPS):
        for number, block in enumerate(model.blocks):
            block.requires_grad_(step >= 3 * number)
        usual(model, optimizer, step)
    return model.state_dict()


def retrying(give: Give) -> State:
    """Takes a smaller batch where a layer, or its backward, finds no memory."""
    model, fails = Net(), {"forward": False, "backward": False}

    def fail(place: str) -> None:
        if fails[place]:
            fails[place] = False
            raise RuntimeError("out of memory")

    def in_backward(gradient: torch.Tensor) -> None:
        fail("backward")

    model.blocks[2][1].register_forward_pre_hook(lambda *_: fail("forward"))  # type: ignore[index,union-attr,operator]
    model.blocks[1][3].register_forward_hook(lambda *given: given[-1].register_hook(in_backward) and None)  # type: ignore[index,union-attr,operator]
    optimizer = give(model, adamw(model))
    for step in range(STEPS):
        fails.update(forward=step in (0, 3), backward=step in (1, 5, 6))
        rows = inputs(step)
        while True:
            try:
                optimizer.zero_grad()
                model(rows).square().mean().backward()
                break
            except RuntimeError as error:
                assert "out of memory" in str(error)
                rows = rows[: len(rows) // 2]
        optimizer.step()
    return model.state_dict()


def stepped_in_backward(give: Give) -> State:
    """Steps in the hook of the last gradient, within backward."""
    model = Net()
    optimizer, arrived, number = give(model, adamw(model)), [], len(list(model.parameters()))

    def arrive(parameter: torch.Tensor) -> None:
        arrived.append(parameter)
        if len(arrived) == number:
            arrived.clear()
            optimizer.step()
            optimizer.zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(arrive)
    for step in range(STEPS):
        loss(model, step).backward()
    return model.state_dict()


def reset(give: Give) -> State:
    """Dead rows of weights begin anew, with their averages."""
    model: Any = Net()
    optimizer, weight = give(model, adamw(model)), model.blocks[0][0].weight
    for step in range(STEPS):
        usual(model, optimizer, step)
        if step % 3 == 2:
            with torch.no_grad():
                weight[:5].normal_(0, 0.1)
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[weight][name][:5] = 0
    return model.state_dict()  # type: ignore[no-any-return]


def private(give: Give) -> State:
    """DP-SGD: gradients of each sample by ``torch.func``, clipped, with noise."""
    model = Net().eval()
    optimizer = give(model, adamw(model))

    def of_one(values: State, row: torch.Tensor) -> torch.Tensor:
        return func.functional_call(model, values, (row[None],)).square().mean()  # type: ignore[no-any-return]

    for step in range(STEPS):
        values = {name: one.detach() for name, one in model.named_parameters()}
        each = func.vmap(func.grad(of_one), in_dims=(None, 0))(values, inputs(step))
        for name, one in model.named_parameters():
            rows = each[name].flatten(1)
            short = rows / rows.norm(dim=1, keepdim=True).clamp(min=1.0)
            one.grad = short.mean(0).view_as(one) + 0.001 * torch.randn_like(one)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def pruned(give: Give) -> State:
    """Weights get masks in mid-training, which renames their parameters."""
    model: Any = Net()
    optimizer = give(model, adamw(model))
    for step in range(STEPS):
        if step == 4:
            for block in model.blocks:
                prune.l1_unstructured(block[0], "weight", 0.5)  # type: ignore[no-untyped-call]
        usual(model, optimizer, step)
    return model.state_dict()  # type: ignore[no-any-return]


def handed_on(give: Give) -> State:
    """Trained elsewhere for a while, with plain PyTorch, from a checkpoint, and back."""
    model = Net()
    optimizer = give(model, adamw(model))
    for step in range(4):
        usual(model, optimizer, step)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    found, other = torch.load(file), Net()
    other.load_state_dict(found["model"])
    plain = adamw(other)
    plain.load_state_dict(found["optimizer"])
    for step in range(4, STEPS):
        usual(other, plain, step)
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    for step in range(STEPS, STEPS + 3):
        usual(model, optimizer, step)
    return model.state_dict()


class Named(nn.Module):
    """Takes its input by name, and returns a dict with a list in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(24, 24), nn.LayerNorm(24)

    def forward(self, *, rows: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, Any]:
        found = self.norm(rows + self.inner(rows).tanh())
        return {"rows": found if mask is None else found * mask, "beside": [found.abs().mean(), None]}


class NamedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 24), nn.Linear(24, 2)
        self.blocks = nn.ModuleList(Named() for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows, beside = self.first(rows), torch.zeros(())
        for number, block in enumerate(self.blocks):
            found = block(rows=rows, mask=(torch.rand(8, 1) > 0.2).float() if number else None)
            rows, beside = found["rows"], beside + found["beside"][0]
        return self.last(rows) + beside  # type: ignore[no-any-return]


def named(give: Give) -> State:
    return usually(NamedNet(), give)


def free(give: Give) -> State:
    """Free adversarial training: one backward for the weights and for the change of the input."""
    model, change = Net(), torch.zeros(8, 12)
    optimizer = give(model, adamw(model))
    for step in range(STEPS):
        for _ in range(2):
            given = change.clone().requires_grad_()
            optimizer.zero_grad()
            model(inputs(step) + given).square().mean().backward()
            change = (change + 0.1 * given.grad.sign()).clamp(-0.2, 0.2)  # type: ignore[union-attr]
            optimizer.step()
    return {**model.state_dict(), "change": change}


def tied_anew(give: Give) -> State:
    """An output layer of its own is tied to the words after a step; its parameter is not used any more."""
    model = Tied()
    model.last.weight = nn.Parameter(model.words.weight.detach().clone())
    optimizer, own = give(model, adamw(model)), model.last.weight
    for step in range(STEPS):
        if step == 1:
            model.last.weight = model.words.weight
        tokens = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    return {**model.state_dict(), "own": own.detach()}


def adapters(give: Give) -> State:
    """Two adapters of the same layers, trained in turn, the other one frozen."""
    model: Any = nn.ModuleDict({"net": Net().requires_grad_(False), "a": Net(12), "b": Net(12)})
    optimizer = give(model, adamw(model["a"], model["b"]))
    for step in range(STEPS):
        used, other = ("a", "b") if step % 2 else ("b", "a")
        model[used].requires_grad_(True)
        model[other].requires_grad_(False)
        optimizer.zero_grad()
        model["net"](
            inputs(step) + model[used](inputs(step)) + model[other](inputs(step))
        ).square().mean().backward()
        optimizer.step()
    return model.state_dict()  # type: ignore[no-any-return]


LOOPS = [
    surgery, lookahead, averaged, low_rank, adversarial, bootstrapped, islands, tied, two_of_one, gradual,
    retrying, stepped_in_backward, reset, private, pruned, handed_on, named, free, tied_anew, adapters,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow_cases("two_of_one-swap")
@pytest.mark.long_cases("two_of_one-recompute")
@pytest.mark.parametrize("way", ["keep", "swap", "recompute"])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_weights_are_those_in_memory(
    loop: Callable[[Give], State], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        made.append(offloaded(model, optimizer, tmp_path / str(len(made)), activations=way))
        return made[-1]

    monkeypatch.setattr(training, "ActivationOffload", Forced)
    monkeypatch.setattr(swapper, "SMALL_BYTES", 64)
    made: list[Any] = []
    torch.manual_seed(0)
    expected = {name: one.clone() for name, one in loop(lambda model, optimizer: optimizer).items()}
    torch.manual_seed(0)
    found = loop(give)
    assert [name for name, one in expected.items() if not torch.equal(one, found[name])] == []
    for optimizer in made:
        optimizer.close()
