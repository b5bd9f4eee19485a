"""Options of runs and workers, declared once for the command line, Python and child processes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

from fedloom.core.options import Option

if TYPE_CHECKING:
    from fedloom.engine.observer import RunObserver
    from fedloom.security.options import ClientOptions, ServerOptions


@dataclass(frozen=True)
class JobOptions:
    """Options of a run, a sweep and a search; none of them changes a result."""

    out: Annotated[
        Path | None,
        Option("Folder to create; by default runs/NAME-ALGORITHM-seedN, NAME-sweep or NAME-search.", metavar="DIR"),
    ] = None
    resume: Annotated[
        bool,
        Option(
            "Continue what the folder holds, or the run at the URL where it was published: a run from its last "
            "checkpoint, a sweep or search with its unfinished runs."
        ),
    ] = False
    partition: Annotated[
        str | None,
        Option(
            "Folder or URL, s3://BUCKET/PREFIX, of an existing partition; by default, the experiment's is created.",
            metavar="DIR|URL",
        ),
    ] = None
    packed: Annotated[
        tuple[Path, ...],
        Option(
            "With data.own: a packed client, or a folder of packed clients; repeatable.", flag="--data", metavar="DIR"
        ),
    ] = ()


HEALTH = Option(
    "Also serve health checks, and nothing else, in plaintext on this address, for probes.", metavar="HOST:PORT"
)
METRICS = Option("Serve metrics for Prometheus on this address (docs/metrics.md).", metavar="HOST:PORT")


@dataclass(frozen=True)
class ProbeOptions:
    """Addresses at which a server answers probes, and its audit log."""

    audit: Annotated[
        Path | None,
        Option(
            "Audit log, for authenticated peers; by default logs/audit.jsonl in the run's folder, none for a URL.",
            metavar="FILE",
        ),
    ] = None
    health: Annotated[str | None, HEALTH] = None
    metrics: Annotated[str | None, METRICS] = None


@dataclass(frozen=True)
class ServingOptions(ProbeOptions):
    """Options of an aggregator whose workers connect from elsewhere.

    Attributes
    ----------
    protection
        Its credentials, and who is admitted; None: it serves this machine only.
    """

    listen: Annotated[str, Option("Address to serve on.", metavar="HOST:PORT")] = "127.0.0.1:7733"
    wait_s: Annotated[
        float, Option("Seconds to wait until workers serve every client.", flag="--wait", metavar="S", least=0)
    ] = 600.0
    orphan_after_s: Annotated[
        float | None,
        Option(
            "Stop with exit code 8 after this many seconds without a watcher.",
            flag="--orphan-after",
            metavar="S",
            least=0.1,
        ),
    ] = None
    stay: Annotated[bool, Option("Keep answering watchers after the run, until SIGTERM.")] = False
    protection: Optional["ServerOptions"] = None


@dataclass(frozen=True)
class RunOptions(JobOptions):
    """Options of a run; none of them changes a result.

    Attributes
    ----------
    name
        Name of the published run; None: the folder's name.
    serving
        Options of a listening aggregator; None: the run starts its own workers.
    signals
        Stop after the current round on SIGINT or SIGTERM; a second signal stops at once.
    watcher
        Another observer of rounds and evaluations, called after the observer and the trackers. An error that it raises
        ends the run; a search stops a trial in this way.
    """

    observe: Annotated[
        tuple[Path, ...],
        Option("Like the packed clients, for clients that are only evaluated and never train.", metavar="DIR"),
    ] = ()
    replay: Annotated[
        Path | None,
        Option("Folder of a run whose journal is repeated: the same cohorts, lost clients and numbers.", metavar="RUN"),
    ] = None
    publish: Annotated[
        str | None,
        Option(
            "URL to publish the run at while it runs, s3://BUCKET/PREFIX; by default STORAGE/runs/NAME if `storage` "
            "is a store.",
            metavar="URL",
        ),
    ] = None
    report: Annotated[
        bool,
        Option(
            "Write the report at the end, which takes two seconds; it can be written later.",
            flag="--report/--no-report",
            envvar="FEDLOOM_REPORT",
        ),
    ] = True
    name: str | None = None
    serving: ServingOptions | None = None
    signals: bool = False
    watcher: Optional["RunObserver"] = None


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker.

    Attributes
    ----------
    verify
        Check shards before serving: those of a folder, or of clients that no other worker serves.
    trust
        Credentials for the aggregator; None: plaintext without authentication.
    """

    partition: Annotated[
        str | None,
        Option(
            "Folder or URL, s3://BUCKET/PREFIX, of the partition; each client's data are downloaded when first needed.",
            metavar="DIR|URL",
        ),
    ] = None
    packed: Annotated[
        tuple[Path, ...],
        Option(
            "Instead of a partition: a packed client (`fedloom data pack`), or a folder of packed clients; repeatable.",
            flag="--data",
            metavar="DIR",
        ),
    ] = ()
    observe: Annotated[
        tuple[Path, ...],
        Option("Like --data, for clients that are evaluated and get models but never train.", metavar="DIR"),
    ] = ()
    clients: Annotated[
        str | None,
        Option(
            "Clients to serve: ids, separated by commas, or block I (from 0) of N equal blocks; by default all.",
            metavar="ID,...|I/N",
        ),
    ] = None
    settings: Annotated[
        tuple[str, ...],
        Option(
            "runtime.device (cpu, cuda), runtime.threads (as many as the aggregator's; 1), runtime.clients_at_once "
            "(vectorized together; 1), runtime.save_every_s (largest number of seconds of local training that are lost "
            "with the process, with a folder for states; 60), bandwidth (limit on network traffic: 10Mbit/s each way, "
            "or 2Mbit/s,20Mbit/s up and down), class_counts (true: send the aggregator the clients' numbers of "
            "training examples per class), model_format (of the models that --out keeps: .safetensors, .pt2, .onnx, "
            ".peft), log (file for the log as JSON lines); repeatable.",
            flag="--set",
            metavar="KEY=VALUE",
        ),
    ] = ()
    reconnect_s: Annotated[
        float,
        Option(
            "Seconds to keep retrying an aggregator that does not answer; inf: forever.",
            flag="--reconnect",
            metavar="S|inf",
            least=0,
        ),
    ] = 60.0
    states: Annotated[
        str | None,
        Option(
            "Folder or s3://BUCKET/PREFIX for clients' states, for methods that keep any, and for saves of long local "
            "trainings; every worker must be able to access it. With --data and secure aggregation, a folder also "
            "keeps the record of revealed sums.",
            metavar="DIR|URL",
        ),
    ] = None
    out: Annotated[
        Path | None,
        Option(
            "Keep each client's model in this folder, of the last evaluated round and of the best one, as files that "
            "need no FedLoom.",
            metavar="DIR",
        ),
    ] = None
    only_sums: Annotated[
        bool,
        Option(
            "Refuse an aggregator whose experiment has no secure aggregation with signed keys, or a weaker one than by "
            "default, so that nobody sees the update of a single client.",
            envvar="FEDLOOM_ONLY_SUMS",
        ),
    ] = False
    policy: Annotated[
        Path | None,
        Option(
            "The member's policy: what its worker agrees to (docs/member.md).",
            metavar="FILE",
            envvar="FEDLOOM_POLICY",
        ),
    ] = None
    health: Annotated[str | None, HEALTH] = None
    metrics: Annotated[str | None, METRICS] = None
    verify: bool = True
    trust: Optional["ClientOptions"] = None


@dataclass(frozen=True)
class PrivacyQuestion:
    """Question about the privacy of a training; the values replace the experiment's."""

    clients: Annotated[
        int | None, Option("Number of training clients; by default as the experiment says.", metavar="N")
    ] = None
    examples: Annotated[
        int | None,
        Option(
            "For privacy of examples: training examples of the smallest client; by default from the partition.",
            metavar="N",
        ),
    ] = None
    epsilon: Annotated[
        float | None, Option("Find the noise for this ε; with a noise multiplier, the rounds.", metavar="E")
    ] = None
    noise_multiplier: Annotated[float | None, Option("Find the ε of this noise multiplier.", metavar="Z")] = None
    ledger: Annotated[
        Path | None,
        Option("Ledger of a client that would take part: also show its total with this training.", metavar="FILE"),
    ] = None
