"""Ids to text: each token in its context, and what is no text said so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gyre_traj.errors import NoTokenizer
from gyre_traj.page import write_page
from gyre_traj.text import Decoder

tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer without merges: every byte is a token, so that characters spread over several."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path / "model"


def ids(folder: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    found: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return found


def test_pieces_join_to_the_text(folder: Path) -> None:
    decoder = Decoder(folder)
    text = "a né<|end|>\n<think>日本"
    given = ids(folder, text)
    pieces = decoder.pieces(given)
    assert len(pieces) == len(given)
    assert "".join(pieces) == text
    assert pieces[:6] == ["a", " ", "n", "", "é", "<|end|>"]  # the last token of a character has it
    assert pieces[-6:] == ["", "", "日", "", "", "本"]
    assert decoder.special == frozenset(ids(folder, "<|end|>"))


def test_a_file_does_as_well_as_a_folder(folder: Path) -> None:
    assert Decoder(folder / "tokenizer.json").pieces(ids(folder, "ab")) == ["a", "b"]


def test_what_is_no_text_is_shown_as_such(folder: Path) -> None:
    decoder = Decoder(folder)
    lead = ids(folder, "é")[0]  # begins a character that never ends
    assert decoder.pieces([lead]) == ["\ufffd"]
    pieces = decoder.pieces([lead] * 30 + ids(folder, "ok"))
    assert len(pieces) == 32
    assert "".join(pieces) == "\ufffd" * 30 + "ok"
    assert decoder.pieces([10**6, *ids(folder, "x")]) == ["\ufffd", "x"]
    assert decoder.pieces([]) == []


def test_the_page_shows_the_text(folder: Path, story, tmp_path: Path) -> None:
    from gyre_traj import Call, Header, Log, pack_ids, pack_logprobs

    call = Call(
        call="c",
        execution="e",
        prompt=pack_ids(ids(folder, "hi<|end|>")),
        output=pack_ids(ids(folder, "yes é</script>")),
        logprobs=pack_logprobs([-0.5] * 15),
    )
    write_page(Log(header=Header(execution="e"), calls=[call]), tmp_path / "e.html", tokenizer=folder)
    html = (tmp_path / "e.html").read_text()
    data = json.loads(html.split('id="data">')[1].split("</script>")[0])
    shown = data["calls"][0]
    assert [data["tokens"][token][1] for token in shown["before"]["head"]] == ["h", "i", "<|end|>"]
    assert [data["tokens"][token][2] for token in shown["before"]["head"]] == [False, False, True]
    assert "".join(data["tokens"][token][1] for token in shown["after"]["head"]) == "yes é</script>"
    assert html.count("</script>") == 2  # what closes its own two scripts


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nowhere", "expected a tokenizer.json or a Hugging Face folder"),
        (lambda folder: folder.parent, "expected a tokenizer.json or a Hugging Face folder"),
        (lambda folder: (folder / "bad.json", (folder / "bad.json").write_text("{}"))[0], "cannot be read"),
    ],
)
def test_a_tokenizer_that_is_none_is_named(folder: Path, make, message: str) -> None:
    with pytest.raises(NoTokenizer, match=message):
        Decoder(make(folder))


def test_without_the_library_the_remedy_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(NoTokenizer, match=r"pip install 'gyre-traj\[text\]'"):
        Decoder(folder)
