"""What is checked before an engine's weights are touched."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gyre_sched.engine import verify
from gyre_sched.engine.loading import write_folder
from gyre_sched.engine.refresh import check, decode, label, scratch_folder, shapes
from gyre_sched.errors import RefreshError, WeightsUnknown
from gyre_transport.snapshot import Manifest, SnapshotSource, pull

TENSORS = {"a": ("F32", (2, 3), np.arange(6, dtype="f4")), "b": ("F32", (4,), np.zeros(4, "f4"))}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a config, a tokenizer and the tensors of TENSORS in two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"mine": 1}')
    (folder / "model.safetensors.index.json").write_text("{}")
    for i, (name, (dtype, shape, data)) in enumerate(TENSORS.items()):
        header = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, data.nbytes]}}).encode()
        (folder / f"model-{i}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data.tobytes())
    return folder


def manifest_of(tensors: dict[str, tuple[str, tuple[int, ...], np.ndarray]], version: int = 3) -> Manifest:
    with SnapshotSource("m") as source:
        return source.publish(version, tensors)


def test_shapes_of_a_folder(model: Path) -> None:
    assert shapes(model) == {"a": (2, 3), "b": (4,)}


def test_a_whole_snapshot_passes(model: Path) -> None:
    check(manifest_of({**TENSORS, "tied": TENSORS["b"]}), shapes(model))


def test_what_a_model_computes_or_ties_need_not_be_in_a_snapshot() -> None:
    embedding = ("F32", (4, 2), np.zeros((4, 2), dtype=np.float32))
    snapshot = manifest_of({"model.embed_tokens.weight": embedding})
    embedded = {"model.embed_tokens.weight": (4, 2), "model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}
    check(snapshot, {**embedded, "lm_head.weight": (4, 2)})
    with pytest.raises(RefreshError, match=r"lm_head\.weight"):
        check(snapshot, {**embedded, "lm_head.weight": (5, 2)})


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"a": TENSORS["a"]}, r"'b'.*\(4,\).*no such tensor"),
        ({**TENSORS, "a": ("F32", (3, 2), TENSORS["a"][2])}, r"'a'.*\(2, 3\).*\(3, 2\)"),
    ],
)
def test_a_snapshot_that_would_leave_a_mix_is_refused(model: Path, tensors: dict[str, object], told: str) -> None:
    with pytest.raises(RefreshError, match=told):
        check(manifest_of(tensors), shapes(model))  # type: ignore[arg-type]


def test_a_torn_model_file_is_named(model: Path) -> None:
    (model / "model-0.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(RefreshError, match=r"model-0\.safetensors"):
        shapes(model)


def test_manifests_that_are_not_the_version_asked_for() -> None:
    raw = msgspec.msgpack.encode(manifest_of(TENSORS, version=3))
    assert decode(raw, 3).version == 3
    with pytest.raises(RefreshError, match="expected the manifest of version 4, got that of version 3"):
        decode(raw, 4)
    with pytest.raises(RefreshError, match="without a manifest"):
        decode(b"", 1)
    with pytest.raises(RefreshError, match="does not decode"):
        decode(b"\xc1", 1)


def test_the_folder_is_the_models_with_other_tensors(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    moved = {**TENSORS, "b": ("F32", (4,), np.ones(4, "f4"))}
    with SnapshotSource("m") as source:
        write_folder(pull(source.publish(5, moved), deadline=10), model, folder)
    assert {p.name for p in folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "tokenizer.json").read_text() == '{"mine": 1}'
    assert shapes(folder) == shapes(model)
    assert (folder / "model.safetensors").read_bytes().count(np.ones(4, "f4").tobytes()) == 1


def test_a_label_tells_versions_apart_that_were_made_twice() -> None:
    first, again = manifest_of(TENSORS, 3), manifest_of(TENSORS, 3)
    other = manifest_of({**TENSORS, "b": ("F32", (4,), np.ones(4, "f4"))}, 3)
    assert label(first) == label(again)
    assert label(first).startswith("3-")
    assert label(other).startswith("3-")
    assert label(other) != label(first)


def sha(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def test_checksums_of_an_engine_are_foretold() -> None:
    q, k, v, gate, up, head = (np.full((2, 3), i, "f4") for i in range(6))
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": ("F32", (2, 3), head),
        f"{layer}self_attn.v_proj.weight": ("F32", (2, 3), v),
        f"{layer}self_attn.q_proj.weight": ("F32", (2, 3), q),
        f"{layer}self_attn.k_proj.weight": ("F32", (2, 3), k),
        f"{layer}mlp.gate_proj.weight": ("F32", (2, 3), gate),
        f"{layer}mlp.up_proj.weight": ("F32", (2, 3), up),
        f"{layer}mlp.down_proj.weight": ("F32", (2, 3), up),
        f"{layer}norm.weight": ("BF16", (3,), np.zeros(3, "u2")),
    }
    with SnapshotSource("m") as source:
        found = verify.expected(pull(source.publish(1, tensors), deadline=10), "float32")
    assert found == {
        "model.embed_tokens.weight": sha(head.tobytes(), bytes(62 * 3 * 4)),
        f"{layer}self_attn.qkv_proj.weight": sha(q.tobytes(), k.tobytes(), v.tobytes()),
        f"{layer}mlp.gate_up_proj.weight": sha(gate.tobytes(), up.tobytes()),
        f"{layer}mlp.down_proj.weight": sha(up.tobytes()),
    }, "what is rounded on loading cannot be foretold"


def test_another_checksum_is_no_version() -> None:
    ranks = [{"checksums": {"a": "00", "b": "11", "rotary": "ff"}}]
    assert verify.compare({"a": "00", "c": "22"}, ranks, "e", "3-aa") == 1
    with pytest.raises(WeightsUnknown, match=r"loaded 3-aa, but its 'b' has checksum 11.*restarted"):
        verify.compare({"a": "00", "b": "12"}, ranks, "e", "3-aa")


def test_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert scratch_folder("", 10) == tmp_path
    assert scratch_folder(str(tmp_path), 10) == tmp_path
    with pytest.raises(RefreshError, match=r"no room for .* bytes .*engine\.scratch"):
        scratch_folder(str(tmp_path), 10 * shutil.disk_usage(tmp_path).total)
    with pytest.raises(RefreshError, match="absent"):
        scratch_folder(str(tmp_path / "absent"), 1)
