"""Client: local SGD from the model that it receives."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_app.task import LeNet, shard, train, visit_generator

app = ClientApp()


@app.train()
def train_client(message: Message, context: Context) -> Message:
    """Train in one visit."""
    config = context.run_config
    client = int(context.node_config["partition-id"])
    number = int(message.content["config"]["server-round"])
    net = LeNet()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = shard(str(config["folder"]), client)
    generator = visit_generator(int(config["seed"]), number, client)
    loss = train(net, data["train_x"], data["train_y"], config, generator)
    content = RecordDict(
        {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"train_loss": loss, "num-examples": len(data["train_x"])}),
        }
    )
    return Message(content=content, reply_to=message)
