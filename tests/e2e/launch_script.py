"""Script of a launcher pod: the work of the component ``federate``, between the store and a local folder."""

import os
import sys
from pathlib import Path

from fedloom import experiment as experiments
from fedloom.cluster.federate import federate
from fedloom.cluster.settings import ClusterSettings
from fedloom.errors import FedloomError
from fedloom.storage import open_store

storage, fingerprint, run_id = (os.environ[name] for name in ("STORAGE", "FINGERPRINT", "RUN_ID"))
work = Path.cwd()
(work / "experiment.yaml").write_text(os.environ["EXPERIMENT"])
try:
    store = open_store(storage)
    shards = store.under(f"partitions/{fingerprint}")
    for entry in shards.entries():
        shards.download(entry.name, work / "partition" / entry.name)
    federate(
        experiments.load_experiment(work / "experiment.yaml"),
        work / "partition",
        work / "out",
        backend="kubernetes",
        cluster=ClusterSettings.from_json(os.environ["CLUSTER"]),
        run_id=run_id,
    )
    for path in (work / "out").rglob("*"):
        if path.is_file():
            store.upload(f"launched/{run_id}/{path.relative_to(work / 'out')}", path)
except FedloomError as error:
    sys.exit(print(f"error: {error}", file=sys.stderr) or int(error.exit_code))
