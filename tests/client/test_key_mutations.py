"""No stale hits: 10,000 (slow: 2,500, fast: 1,000) random changes of what decides features, with real layers.

Every change gives a key that no other state has, the unchanged one included. Most are changes of the pieces that a key
is built from, some of the images' files and of whole sessions.
"""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from PIL import Image
from support.local_job import open_session, pack_pictures, service_of
from torch import nn

from hapi.cache import code_version as versions
from hapi.cache.code_version import code_version, code_versions, digest_of_versions
from hapi.cache.feature_key import FeatureKey
from hapi.client.caching.keys import ServerCode, feature_key
from hapi.client.job_context import JobContext
from hapi.codecs.names import LOSSY
from hapi.data.index import SampleIndex, digest
from hapi.data.index_file import read_index
from hapi.data.manifest import Manifest, load_manifest
from hapi.ingest.pack import pack
from hapi.ingest.sources.open import open_source
from hapi.models.graph.layers import LayeredModel, layered
from hapi.models.graph.precision import in_precision
from hapi.server.service import Service
from hapi.store.open import open_store
from hapi.wire.references import Augmentation, TransformSpec

COUNTS = {
    "bit": 3700,
    "sample": 2000,
    "transform": 1500,
    "library": 1000,
    "draw": 700,
    "structure": 300,
    "run": 500,
    "rounding": 300,
}
"""Changes of each kind: 10,000 in all."""
PICTURES: dict[str, Any] = {"dataset": "pictures", "image_size": 32, "split": "freeze"}
CPU = torch.device("cpu")


class Bench:
    """A session's job, with the pieces of its key to change one at a time."""

    def __init__(self, job_context: JobContext, manifest: Manifest, index: SampleIndex) -> None:
        self.base, self.manifest, self.index = job_context, manifest, index
        self.model = net()
        self.codes = (ServerCode("http://one", code_version()),)
        self.random = random.Random(28)

    def key(self, cut: int = 5, model: LayeredModel | None = None, codes: Any = None, **pieces: Any) -> str:
        """The digest with these fields of the job in the place of its own."""
        job, layers = copy.copy(self.base), self.model if model is None else model
        own = {
            "model": layers,
            "frozen": layers,
            "prefix_digests": tuple(layers.prefix_digests(6)),
            "candidate_splits": range(7),
        }
        for name, value in {**own, **pieces}.items():
            setattr(job, name, value)
        found = feature_key(job, cut, codes=self.codes if codes is None else codes)
        assert isinstance(found, FeatureKey)
        return found.digest

    def of_version(self, manifest: Manifest) -> str:
        reference = replace(self.base.description.reference, version=manifest.version)
        return self.key(description=replace(self.base.description, reference=reference))

    def of_transform(self, transform: TransformSpec, **pieces: Any) -> str:
        return self.key(transforms=(transform, transform), **pieces)


def net(**changes: Any) -> LayeredModel:
    """A small network; what is changed of its structure changes no tensor."""
    v = {
        "stride": 1,
        "padding": 1,
        "dilation": 1,
        "eps": 1e-5,
        "act": nn.ReLU,
        "pool": 2,
        "side": 16,
        **changes,
    }
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, v["stride"], v["padding"], v["dilation"]),
        nn.BatchNorm2d(4, eps=v["eps"]),
        v["act"](),
        nn.AvgPool2d(v["pool"]),
        nn.Conv2d(4, 4, 1),
        nn.Softplus(beta=v.get("beta", 1.0), threshold=v.get("threshold", 20.0)),
        nn.Flatten(),
    )
    return layered(module.eval(), (3, v["side"], v["side"]))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    store = tmp_path_factory.mktemp("mutations") / "store"
    pack_pictures(store, count=12)
    with service_of(store) as running:
        yield running


@pytest.fixture(scope="module")
def bench(service: Service) -> Iterator[Bench]:
    manifest = load_manifest(service.store, "pictures")
    index = read_index(service.store, manifest)
    with open_session(service, **PICTURES) as session:
        yield Bench(session.job_context, manifest, index)


def a_bit(b: Bench) -> tuple[str, str]:
    """One bit of one element of a parameter or buffer before the cut."""
    name = b.random.choice(b.model.tensor_names(0, 5))
    tensor = b.model.tensors.get(name).detach()
    words = tensor.view({4: torch.int32, 8: torch.int64}[tensor.itemsize]).reshape(-1)
    place, bit = b.random.randrange(words.numel()), b.random.randrange(31)
    words[place] ^= 1 << bit
    found = b.key()
    words[place] ^= 1 << bit
    return f"{name}[{place}] bit {bit}", found


def a_sample(b: Bench) -> tuple[str, str]:
    """Other bytes of one sample, as many as before: its checksum in the index is another one."""
    sample, content = b.random.randrange(len(b.index)), b.random.randbytes(30)
    checksum = b.index.checksum.copy()
    checksum[sample] = xxhash.xxh3_64_intdigest(content)
    encoded = replace(b.index, checksum=checksum).to_bytes()
    return f"sample {sample} {content!r}", b.of_version(replace(b.manifest, index_xxh3=digest(encoded)))


def a_transform(b: Bench) -> tuple[str, str]:
    spec = b.base.transforms[0]
    assert spec is not None
    number = b.random.randrange(8)
    if number == 0:
        changed = replace(spec, resize=b.random.randrange(38, 4000))
    elif number == 1:
        changed = replace(spec, crop=b.random.randrange(1, 32))
    else:
        name, place = ("mean", "std")[number % 2], number // 2 - 1
        values = list(getattr(spec, name))
        values[place] = np.nextafter(values[place], 1.0) if number == 7 else b.random.random() + 1e-3
        changed = replace(spec, **{name: tuple(values)})
    return f"{changed}", b.of_transform(changed)


def a_library(b: Bench) -> tuple[str, str]:
    """Another version of a library, or of Hapi's own code, on one of the servers."""
    name = b.random.choice(list(code_versions()))
    version = f"{b.random.randrange(100)}.{b.random.randrange(100)}"
    code = digest_of_versions({**code_versions(), name: version})
    return f"{name} {version}", b.key(codes=[*b.codes, ServerCode("http://two", code)])


def a_draw(b: Bench) -> tuple[str, str]:
    """The view, the seed and the amounts of a random transform."""
    spec = b.base.transforms[0]
    assert spec is not None
    augment = Augmentation(flip=b.random.choice([0.25, 0.5]), brightness=b.random.choice([0.0, 0.1]))
    seed, view = b.random.randrange(1 << 31), b.random.randrange(8)
    job = copy.copy(b.base)
    job.views, job.order = 8, replace(job.order, seed=seed)
    job.transforms = (replace(spec, augment=augment), None)
    found = feature_key(job, 12, view=view, codes=b.codes)
    assert isinstance(found, FeatureKey)
    return f"{augment} {seed} {view}", found.digest


def a_structure(b: Bench) -> tuple[str, str]:
    changes: dict[str, Callable[[], Any]] = {
        "stride": lambda: 2,
        "padding": lambda: b.random.choice([0, 2, 3]),
        "dilation": lambda: 2,
        "eps": lambda: b.random.uniform(1e-6, 1e-2),
        "act": lambda: b.random.choice(
            [nn.ReLU6, nn.Tanh, nn.GELU, nn.Hardswish, partial(nn.LeakyReLU, 0.1)]
        ),
        "pool": lambda: b.random.choice([1, 3, 4]),
        "side": lambda: b.random.choice([12, 20, 24]),
        "beta": lambda: b.random.uniform(1.5, 2.5),
        "threshold": lambda: b.random.uniform(10, 30),
    }
    name = b.random.choice(list(changes))
    value = changes[name]()
    return f"{name}={value}", b.key(6, net(**{name: value}))


def a_run(b: Bench) -> tuple[str, str]:
    """The cut, the precision, TF32, and the numbers of samples and classes of the dataset, in any combination."""
    cut, precision = b.random.randrange(7), b.random.choice(["fp32", "bf16", "fp16"])
    tf32, classes = b.random.random() < 0.5, b.random.choice([4, 5])
    model = in_precision(b.model, precision, CPU, 6)
    names = tuple(f"c{n}" for n in range(classes))
    version = replace(b.manifest, classes=names, count=b.random.choice([12, 13])).version
    description = replace(
        b.base.description, reference=replace(b.base.description.reference, version=version)
    )
    pieces = {"frozen": model, "precision": precision, "tf32": tf32, "description": description}
    return f"{cut} {precision} {tf32} {version}", b.key(cut, **pieces)


def a_rounding(b: Bench) -> tuple[str, str]:
    """A codec that rounds what crosses, and the layer after which it does."""
    codec, cut = b.random.choice(LOSSY), b.random.randrange(1, 7)
    split = b.random.randrange(1, cut + 1)
    return f"{codec} {cut} {split}", b.key(cut, wire_rounding=codec, split=split)


@pytest.mark.slow
@pytest.mark.parametrize(
    "share", [10, pytest.param(4, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)]
)
def test_ten_thousand_changes_and_no_stale_hit(bench: Bench, share: int) -> None:
    """All of them, and shares of each kind."""
    kinds = {"bit": a_bit, "sample": a_sample, "transform": a_transform, "library": a_library, "draw": a_draw,
             "structure": a_structure, "run": a_run, "rounding": a_rounding}  # fmt: skip
    assert sum(COUNTS.values()) == 10_000
    unchanged = {bench.key(cut) for cut in range(7)}
    assert len(unchanged) == 7
    seen: dict[str, str] = {}
    for kind, count in COUNTS.items():
        for _ in range(count // share):
            what, key = kinds[kind](bench)
            is_base = kind == "run" and what.split()[1:3] == ["fp32", "False"]
            assert key not in unchanged or is_base, f"a stale hit: {kind} {what}"
            assert seen.setdefault(key, f"{kind} {what}") == f"{kind} {what}"
    assert {bench.key(cut) for cut in range(7)} == unchanged, "nothing is left changed"
    assert min(Counter(text.split()[0] for text in seen.values()).values()) >= 15


def test_rounding_counts_where_something_was_rounded(bench: Bench) -> None:
    exact = bench.key()
    assert bench.key(wire_rounding="int8", split=0) == exact, "stored samples cross as they are"
    assert bench.key(split=3) == exact, "where they cross is of no meaning then"
    assert bench.key(wire_rounding="int8", split=9) == bench.key(wire_rounding="int8", split=5) != exact
    assert len({bench.key(wire_rounding=codec, split=3) for codec in ("none", *LOSSY)}) == 4


@pytest.mark.parametrize("constant", ["TRANSFORMS_VERSION", "LAYERS_VERSION", "ROUNDING_VERSION"])
def test_hapis_own_constants(bench: Bench, monkeypatch: pytest.MonkeyPatch, constant: str) -> None:
    before = bench.key()
    monkeypatch.setattr(versions, constant, getattr(versions, constant) + 1)
    monkeypatch.setattr(versions, "code_versions", versions.code_versions.__wrapped__)
    assert bench.key(codes=[ServerCode("http://one", code_version())]) != before
    assert bench.key() != before, "on this side alone as well"


@pytest.mark.slow
def test_files_edited_under_their_names(service: Service, tmp_path: Path) -> None:
    """Pictures of the same size in bytes and with the same times, packed again."""
    store, seen = tmp_path / "store", set()
    pack_pictures(store, count=8)
    folder, draw = tmp_path / "store-pictures", random.Random(1)
    files = sorted(folder.rglob("*.png"))
    for file in files:  # stored without compression, so that other pixels have as many bytes
        Image.open(file).convert("RGB").save(file, compress_level=0)
    for _ in range(12):
        manifest = pack(open_source(str(folder)), open_store(str(store)), "pictures", replace=True)
        with service_of(store) as running, open_session(running, **PICTURES) as session:
            key = feature_key(session.job_context, 13, codes=[ServerCode("", code_version())])
        assert isinstance(key, FeatureKey) and key.dataset.version == manifest.version
        assert key.digest not in seen
        seen.add(key.digest)
        edit_in_place(draw.choice(files), draw)


def edit_in_place(file: Path, draw: random.Random) -> None:
    """Change a pixel of a picture, but neither its size nor its times."""

    before = file.stat()
    image = Image.open(file).convert("RGB")
    image.putpixel((draw.randrange(30), draw.randrange(30)), tuple(draw.randbytes(3)))
    image.save(file, compress_level=0)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
