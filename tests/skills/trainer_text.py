"""Sentence classification by a small BERT, with the Trainer."""

from datasets import load_dataset
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def main():
    tokenizer = AutoTokenizer.from_pretrained("tokenizer")
    data = load_dataset("my-organization/reviews")
    data = data.map(lambda rows: tokenizer(rows["review"], truncation=True, padding="max_length", max_length=12))
    model = BertForSequenceClassification(BertConfig(**SIZES, vocab_size=60, num_labels=2))
    arguments = TrainingArguments("outputs", learning_rate=2e-3, num_train_epochs=2, weight_decay=0.01)
    Trainer(model=model, args=arguments, train_dataset=data["train"], eval_dataset=data["test"]).train()


if __name__ == "__main__":
    main()
