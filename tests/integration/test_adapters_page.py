"""The programs of docs/models.md, on a small random model and made-up reviews."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from lazy import lazy_or_skip

transformers = lazy_or_skip("transformers")
lazy_or_skip("peft")
pd = lazy_or_skip("pandas")
tokenizers = lazy_or_skip("tokenizers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
WORDS = ["[PAD]", "[UNK]", *(f"word{i}" for i in range(90))]


def save_model(folder: Path) -> None:
    """Save a small random model of transformers with a tokenizer of whole words."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(str(folder))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(WORDS), **sizes)
    transformers.BertModel(config).save_pretrained(str(folder))


def test_programs_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, section = PAGE.read_text(encoding="utf-8").partition("\n## Personal adapters\n")
    factory, program, opening = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))
    (tmp_path / "my_models.py").write_text(factory)
    save_model(tmp_path / "my-model")
    rows = [(f"shop {i % 3}", f"{WORDS[2 + i]} {WORDS[2 + i // 2]}", 1 + i % 5) for i in range(90)]
    pd.DataFrame(rows, columns=["shop", "review", "stars"]).to_csv("reviews.csv", index=False)
    there: dict[str, Any] = {}
    assert len([line for line in program.splitlines() if line.strip()]) <= 15
    exec(program.replace('"rounds": 30', '"rounds": 2'), there)
    exec(factory + opening, there)
    assert len(list((tmp_path / "adapters").iterdir())) == 3
    texts = there["text"]["tokenizer"]
    ids = transformers.AutoTokenizer.from_pretrained(texts)(["word1 word2"], padding="max_length", max_length=32)
    import torch

    batch = {name: torch.tensor(ids[name]) for name in ("input_ids", "attention_mask")}
    found = there["model"](**batch).logits.softmax(1)
    expected = there["run"].models("client-0000")(batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    sys.modules.pop("my_models")
