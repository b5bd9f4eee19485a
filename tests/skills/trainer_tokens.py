"""A small GPT-2 on tokens of its own, with the Trainer."""

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def make_model(layers: int = 1) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=layers, n_head=2))


class Windows:
    """Windows of a text, each of which is its own target."""

    def __init__(self, ids, length=16):
        self.windows = [ids[i : i + length] for i in range(0, len(ids) - length, length)]

    def __getitem__(self, i):
        return {"input_ids": self.windows[i], "labels": self.windows[i]}

    def __len__(self):
        return len(self.windows)


def main(ids):
    model = make_model()
    arguments = TrainingArguments(output_dir="outputs", num_train_epochs=2, gradient_accumulation_steps=2)
    Trainer(model, arguments, train_dataset=Windows(ids)).train()
