"""The client of the app."""

import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from task import Net, load_data
from task import train as train_model

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    node, settings = context.node_config, context.run_config
    loader, _ = load_data(node["partition-id"], node["num-partitions"], settings["batch-size"])
    train_model(model, loader, settings["local-epochs"], message.content["config"]["lr"], device)
    return Message(content=RecordDict({"arrays": ArrayRecord(model.state_dict())}), reply_to=message)
