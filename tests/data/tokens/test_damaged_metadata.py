"""A byte that flips in one of our own JSON files: the file is named as damaged with a way out that works."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from piledriver.cli.main import main
from piledriver.core.errors import CorruptFileError, PiledriverError
from piledriver.data.record import read_record, record_stream
from piledriver.data.stream.token_stream import StreamConfig, TokenStream, open_stream
from piledriver.data.tokens.token_set import open_tokens
from piledriver.data.tokens.tokenize import TokenizeConfig, tokenize_corpus
from piledriver.data.trace import trace_step

SETTINGS = TokenizeConfig(shard_tokens=2000)


@pytest.fixture
def folder(tmp_path, tokens_folder) -> Path:
    return Path(shutil.copytree(tokens_folder, tmp_path / "tokens"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def break_text(path: Path) -> None:
    """A byte that is in no UTF-8 text, in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] = 0xFF
    path.write_bytes(content)


def flipped(content: bytes, times: int) -> Iterator[bytes]:
    """The same with one bit, or all bits, of one byte the other way round, at random places."""
    luck = random.Random(0)
    for _ in range(times):
        at, mask = luck.randrange(len(content)), luck.choice([0xFF, 1, 2, 4, 8, 16, 64, 128])
        yield content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :]


def use_tokens(folder: Path) -> None:
    stream = TokenStream(StreamConfig(tokens=str(folder), seq_len=16), open_tokens(folder, check="sizes"))
    stream.read(0, 2)


def use_record(folder: Path) -> None:
    read_record(folder)
    trace_step(folder, 3)


@pytest.mark.parametrize(("name", "use"), [("tokens.json", use_tokens), ("stream.json", use_record)])
def test_whatever_flips_nothing_but_our_own_errors_come_out(folder: Path, name: str, use: Callable[[Path], None]):
    record_stream(folder, open_stream(StreamConfig(tokens=str(folder), seq_len=16)), windows_per_step=4)
    path, refused = folder / name, 0
    for content in flipped(path.read_bytes(), 300):
        path.write_bytes(content)
        try:
            use(folder)
        except PiledriverError as error:
            assert error.fix
            refused += 1
    assert refused > 200, "a letter of a licence is anybody's guess; the rest is noticed"


@pytest.mark.parametrize("name", ["tokens.json", "stream.json", "job.json"])
def test_at_the_command_line_the_file_is_named_with_a_command(
    folder: Path, corpus, tokenizer_path, name: str, capsys: pytest.CaptureFixture[str]
):
    record_stream(folder, open_stream(StreamConfig(tokens=str(folder), seq_len=16)), windows_per_step=4)
    break_text(folder / name)
    verb = ["trace", str(folder), "--step", "1"]
    if name == "job.json":
        verb = ["tokenize", str(corpus), "--tokenizer", str(tokenizer_path), "-o", str(folder), "--shard-tokens=2000"]
    assert main(verb) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{folder / name} is damaged: byte " in said
    assert "run the same command" in said if name == "job.json" else "piledriver t" in said


@pytest.mark.parametrize("lost", ["tokens.json", "00001-000.json", "00000-001.starts.npy", "00000-000.tokens.npy"])
@pytest.mark.parametrize("how", [break_text, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-9])])
def test_tokenising_again_makes_what_was_lost_and_no_other_byte(
    folder, corpus, tokenizer_path, tokens_folder, lost, how
):
    how(folder / lost)
    if lost.endswith(".npy") and how is break_text:
        (folder / lost).unlink()  # as the message of the checksum says
    elif lost != "00001-000.json":  # which only goes on with an unfinished job
        with pytest.raises(PiledriverError, match=lost):
            open_tokens(folder)
    tokenize_corpus(corpus, tokenizer_path, folder, SETTINGS)
    tokenize_corpus(corpus, tokenizer_path, folder, SETTINGS)
    assert {**contents(folder), "00001-000.json": b""} == {**contents(tokens_folder), "00001-000.json": b""}


def test_a_job_that_was_cut_off_takes_no_unit_at_its_note_alone(folder, corpus, tokenizer_path, tokens_folder):
    """A note says that a unit is done; a shard of it that was lost since is made again, not left out."""
    (folder / "tokens.json").unlink()
    (folder / "00000-001.index.npy").unlink()
    (folder / "unit-00000.json").write_text('{"shards": 3, "documents": 40}')
    (folder / "unit-00001.json").write_bytes(b"\xff")
    tokenize_corpus(corpus, tokenizer_path, folder, SETTINGS)
    assert contents(folder) == contents(tokens_folder)


def test_a_damaged_claim_can_be_removed(folder, corpus, tokenizer_path, tokens_folder):
    break_text(folder / "job.json")
    with pytest.raises(CorruptFileError, match=r"job\.json is damaged.*remove it"):
        tokenize_corpus(corpus, tokenizer_path, folder, SETTINGS)
    (folder / "job.json").unlink()
    tokenize_corpus(corpus, tokenizer_path, folder, SETTINGS)
    assert contents(folder) == contents(tokens_folder)
    (folder / "job.json").unlink()
    with pytest.raises(PiledriverError, match="holds other token shards"):
        tokenize_corpus(corpus, tokenizer_path, folder, TokenizeConfig(shard_tokens=99))


def test_a_table_of_bytes_that_is_damaged_is_named(folder):
    path = folder / "piece_bytes.npy"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CorruptFileError, match=r"piece_bytes\.npy is damaged"):
        _ = open_tokens(folder).piece_bytes
