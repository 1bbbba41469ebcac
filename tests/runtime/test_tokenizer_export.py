"""Tokenizers out of checkpoints: as they are, converted once, and refused with one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer

from paceline.errors import ConfigError, CorruptModel, ModelNotFound, UnsupportedModel
from paceline.runtime.formats.digest import files_digest
from paceline.runtime.tokenizer_export import export_tokenizer, kept_tokenizer, read_eos_token_ids
from paceline.text.tokenizer import Tokenizer as OurTokenizer

TEXTS = ("low lower lowest", "<|im_start|>user\nhello 12345<|im_end|>", "naïve 東京 🙂", "  spaces\t\n\n")


def byte_level_vocab() -> dict[str, int]:
    """The 256 bytes as GPT-2 spells them, two merged tokens and two special ones."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "lo", "low"]
    return {token: index for index, token in enumerate(tokens)}


def write_gguf(path: Path, template: str = "{{ messages[0]['content'] }}") -> None:
    vocab = byte_level_vocab()
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(vocab))
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(vocab) - 2))
    writer.add_token_merges(["l o", "lo w"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    made = export_tokenizer(tmp_path / "m.gguf", tmp_path / "deep" / "out", vocab_size=260)
    assert made == tmp_path / "deep" / "out"
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    vocab = byte_level_vocab()
    assert tokenizer.encode("low", add_special_tokens=False).ids == [vocab["low"]]
    assert tokenizer.encode("<|im_start|>l<|im_end|>", add_special_tokens=False).ids == [0, vocab["l"], 1]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    settings = json.loads((made / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    # GPT-2's own special token, which the converter adds and the file does not have.
    assert tokenizer.token_to_id("<|endoftext|>") is None
    assert settings.get("unk_token") is None
    assert "messages[0]" in (made / "chat_template.jinja").read_text()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]  # nothing half made is left


def test_a_conversion_is_kept_until_its_source_changes(tmp_path: Path) -> None:
    source, out = tmp_path / "m.gguf", tmp_path / "out"
    write_gguf(source)
    export_tokenizer(source, out)
    (out / "marker").touch()
    export_tokenizer(source, out)
    assert (out / "marker").exists()
    write_gguf(source, template="another one")
    export_tokenizer(source, out)
    assert not (out / "marker").exists()
    assert (out / "chat_template.jinja").read_text() == "another one"


def test_a_conversion_of_known_content_is_kept_without_reading_its_source(tmp_path: Path) -> None:
    source, out = tmp_path / "m.gguf", tmp_path / "out"
    write_gguf(source)
    before = files_digest([source])
    assert kept_tokenizer(out, before) is None
    export_tokenizer(source, out, content=before)
    (out / "marker").touch()
    assert kept_tokenizer(out, before) == out
    unread = source.rename(tmp_path / "elsewhere.gguf")
    source.write_bytes(b"no GGUF")
    assert export_tokenizer(source, out, content=before) == out
    assert (out / "marker").exists()
    unread.rename(source)
    # A file of the same size, with one token spelled in another way, is another content.
    source.write_bytes(source.read_bytes().replace(b"<|im_end|>", b"<|in_end|>"))
    after = files_digest([source])
    assert kept_tokenizer(out, after) is None
    export_tokenizer(source, out, content=after)
    assert not (out / "marker").exists()
    assert kept_tokenizer(out, after) == out
    assert "<|in_end|>" in Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "file").touch()  # also to root, a file is no folder
    with pytest.raises(ConfigError, match=r"cannot be stored in .*file/cache: Not a directory; give XDG_CACHE_HOME"):
        export_tokenizer(tmp_path / "m.gguf", tmp_path / "file" / "cache" / "out")
    export_tokenizer(tmp_path / "m.gguf", tmp_path / "out")
    (tmp_path / "out").chmod(0o555)
    export_tokenizer(tmp_path / "m.gguf", tmp_path / "out")  # what is there needs no writing


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    precious = tmp_path / "home" / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    with pytest.raises(ConfigError, match="not replaced"):
        export_tokenizer(tmp_path / "m.gguf", precious.parent)
    assert precious.exists()


def test_a_folder_with_a_tokenizer_is_used_as_it_is(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    folder = export_tokenizer(tmp_path / "m.gguf", tmp_path / "model")
    assert export_tokenizer(folder, tmp_path / "unused") == folder
    assert not (tmp_path / "unused").exists()


def test_a_slow_tokenizer_is_converted(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "vocab.json").write_text(json.dumps(byte_level_vocab()))
    (model / "merges.txt").write_text("#version: 0.2\nl o\nlo w\n")
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"})
    )
    made = export_tokenizer(model, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    assert tokenizer.encode("low").ids == [byte_level_vocab()["low"]]


def test_what_has_no_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such file or folder"):
        export_tokenizer(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(UnsupportedModel, match="no tokenizer here"):
        export_tokenizer(tmp_path, tmp_path / "out")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Unheard"}))
    with pytest.raises(UnsupportedModel, match="cannot convert its tokenizer") as caught:
        export_tokenizer(tmp_path, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    assert export_tokenizer(tmp_path / "m.gguf", tmp_path / "out", vocab_size=260)
    with pytest.raises(CorruptModel, match="ids up to 259, the model's vocabulary ends at 258"):
        export_tokenizer(tmp_path / "m.gguf", tmp_path / "out", vocab_size=259)


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "low"}, "absent", None])
def test_the_end_of_a_text_is_the_one_that_the_tokenizer_names(tmp_path: Path, eos: object) -> None:
    write_gguf(tmp_path / "m.gguf")
    made = export_tokenizer(tmp_path / "m.gguf", tmp_path / "out")
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    found = read_eos_token_ids(made, 260)
    assert found == OurTokenizer.from_dir(made).eos_token_ids
    assert bool(found) == (eos not in ("absent", None))


def test_the_end_of_a_text_in_a_unigram_vocabulary(tmp_path: Path) -> None:
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["a", -1.0]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert read_eos_token_ids(tmp_path, 3) == OurTokenizer.from_dir(tmp_path).eos_token_ids == (1,)
    with pytest.raises(CorruptModel, match="ids up to 2"):
        read_eos_token_ids(tmp_path, 2)


def test_the_default_model_speaks_as_transformers_says(default_path: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    made = export_tokenizer(default_path, tmp_path / "out", vocab_size=49_152)
    theirs = AutoTokenizer.from_pretrained(default_path.parent, gguf_file=default_path.name)
    ours = Tokenizer.from_file(str(made / "tokenizer.json"))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text).input_ids
    assert json.loads((made / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
