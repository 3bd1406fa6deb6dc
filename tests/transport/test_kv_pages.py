"""KV pages between a pool's buffers and a store's slots."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

PAGE, PAGES, LAYERS = 4, 6, 3


def make_pool(seed: int, *, values: int = 8, **more: Any) -> SimpleNamespace:
    """Keys [tokens, 2, 8] and values [tokens, 2, `values`] of a few layers, in bf16, with the page SGLang adds."""
    import torch

    made = torch.Generator().manual_seed(seed)

    def buffers(width: int) -> list[Any]:
        shape = ((PAGES + 1) * PAGE, 2, width)
        return [torch.randn(shape, generator=made).to(torch.bfloat16) for _ in range(LAYERS)]

    return SimpleNamespace(k_buffer=buffers(8), v_buffer=buffers(values), **more)


def bound(pool: Any, slots: int = 5) -> Any:
    from gyre_transport.kv.pages import PoolPages
    from gyre_transport.kv.store import PageStore

    pages = PoolPages(pool, PAGE)
    store = PageStore(slots, pages.page_nbytes)
    pages.bind(store)
    return pages, store


def rows(page: int) -> slice:
    return slice(page * PAGE, (page + 1) * PAGE)


@pytest.mark.parametrize("values", [8, 4])
def test_pages_go_to_slots_and_into_another_pool(values: int) -> None:
    import torch

    source, target = make_pool(1, values=values), make_pool(2, values=values)
    before = make_pool(2, values=values)
    out, store = bound(source)
    back, other = bound(target)
    assert out.page_nbytes == LAYERS * PAGE * 2 * (8 + values) * 2
    assert out.pages == PAGES + 1
    out.save(torch.tensor([5, 1, 2]), [0, 4, 3])
    other.memory[[2, 1, 0]] = store.memory[[0, 4, 3]]
    for layer in range(LAYERS):
        back.restore(layer, [2, 1, 0], torch.tensor([3, 6, 0]))
    for kind in ("k_buffer", "v_buffer"):
        for layer in range(LAYERS):
            now, was, came = getattr(target, kind)[layer], getattr(before, kind)[layer], getattr(source, kind)[layer]
            for here, there in ((3, 5), (6, 1), (0, 2)):
                assert torch.equal(now[rows(here)], came[rows(there)])
            for page in (1, 2, 4, 5):
                assert torch.equal(now[rows(page)], was[rows(page)]), "other pages are left alone"
    store.close()
    other.close()


def test_a_page_lies_layer_by_layer_keys_before_values() -> None:
    import torch

    pool = make_pool(1)
    pages, store = bound(pool)
    pages.save(torch.tensor([2]), [1])
    parts = [b[rows(2)].reshape(-1) for pair in zip(pool.k_buffer, pool.v_buffer, strict=True) for b in pair]
    assert store.memory[1].tobytes() == torch.cat(parts).view(torch.uint8).numpy().tobytes()
    store.close()


def test_many_pages_are_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from gyre_transport.kv import pages as module

    monkeypatch.setattr(module, "_STAGE", 2)
    pool = make_pool(1)
    pages, store = bound(pool)
    pages.save(torch.arange(5), [4, 3, 2, 1, 0])
    whole = make_pool(3)
    back, _ = bound(whole)
    back._slots = pages._slots
    for layer in range(LAYERS):
        back.restore(layer, [4, 3, 2, 1, 0], torch.arange(5))
    assert torch.equal(whole.k_buffer[1][: 5 * PAGE], pool.k_buffer[1][: 5 * PAGE])
    store.close()


def test_indices_are_whole_pages() -> None:
    import torch

    from gyre_transport.kv.pages import UnfitPool

    pages, store = bound(make_pool(1))
    assert pages.locate(torch.tensor([8, 9, 10, 11, 4, 5, 6, 7])).tolist() == [2, 1]
    for wrong in ([1, 2, 3, 4], [4, 5, 6, 8]):
        with pytest.raises(UnfitPool, match="aligned pages"):
            pages.locate(torch.tensor(wrong))
    store.close()


@pytest.mark.parametrize("what", ["no keys", "scaled", "strided", "mixed"])
def test_pools_it_does_not_know_are_refused(what: str) -> None:
    import torch

    from gyre_transport.kv.pages import PoolPages, UnfitPool

    pool = make_pool(1)
    match what:
        case "no keys":
            pool = SimpleNamespace(kv_buffer=pool.k_buffer)
        case "scaled":
            pool.k_scale_buffer = pool.k_buffer
        case "strided":
            pool.v_buffer[0] = pool.v_buffer[0].transpose(1, 2)
        case "mixed":
            pool.v_buffer[0] = pool.v_buffer[0].to(torch.float16)
    with pytest.raises(UnfitPool, match=r"kv\.moves = false"):
        PoolPages(pool, PAGE)


def test_the_package_imports_without_torch() -> None:
    import subprocess
    import sys

    check = "import sys, gyre_transport.kv.service, gyre_transport.kv.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
