"""Models of a run's clients, or of another partition's clients, as torch modules and as files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedloom.core.files import storing
from fedloom.data.federated import ClientData, FederatedDataset
from fedloom.data.problem import Problem
from fedloom.engine.trained import check_predictor, personalize_each, restore, torch_threads
from fedloom.engine.worker import select_clients
from fedloom.errors import DataError, ExperimentError, QuorumError, argument
from fedloom.models.predictors import Predictor, predictor_of
from fedloom.serving.personal_model import PersonalModel, card_of
from fedloom.serving.serve import about


def client_models(
    run: Path,
    clients: Sequence[str] | None = None,
    checkpoint: str = "last",
    predictor: str = "personal",
    data: Sequence[Path] = (),
) -> dict[str, PersonalModel]:
    """Return the models of a run's clients by id: those that an evaluation of this checkpoint measures.

    :meth:`fedloom.api.run.Run.models` describes the arguments; ``data`` are folders of packed clients.

    Raise DataError if there is no such run, checkpoint or client, or its data are missing or damaged; ExperimentError
    if the method has no such predictor; QuorumError if a client got no model.
    """
    models: dict[str, PersonalModel] = {}

    def chosen(dataset: FederatedDataset) -> Sequence[str]:
        if not dataset.manifest.spec.outputs:
            raise DataError(f"{run}: the data have no targets, so the models make no predictions")
        entries = dataset.manifest.clients if clients is None else map(dataset.manifest.named, clients)
        return [entry.id for entry in entries]

    clients_wanted, failures = _give(run, checkpoint, None, data, predictor, chosen, models.__setitem__)
    if failures:
        client, reason = next(iter(failures.items()))
        raise QuorumError(f"{len(failures)} of {len(clients_wanted)} clients got no model; client {client}: {reason}")
    return {client: models[client] for client in clients_wanted}


@dataclass(frozen=True)
class SavedModels:
    """Ids of the clients whose models were saved, and the reason for each failure."""

    saved: Sequence[str]
    lost: Mapping[str, str]


def save_models(
    run: Path,
    out: Path,
    checkpoint: str = "last",
    partition: str | Path | None = None,
    clients: str | None = None,
    data: Sequence[Path] = (),
    predictor: str = "personal",
    suffix: str = ".safetensors",
) -> SavedModels:
    """Personalize models for seen or new clients and save each to a new folder as ``ID`` and the suffix of a format.

    ``clients`` are comma-separated ids; None: all clients of the partition. ``partition`` and ``data`` are those of
    :func:`fedloom.engine.trained.evaluate`, and the formats those of
    :meth:`fedloom.serving.personal_model.PersonalModel.save`; ``.safetensors`` also writes ``ID.md``.

    Raise as :func:`fedloom.engine.trained.restore`; ExperimentError also if ``out`` exists, the method has no such
    predictor, or the models cannot be saved in this format; DataError also if the partition has no such client.
    """
    if out.exists():
        raise ExperimentError(f"{argument('out')} must be a new folder, and {out} exists.", key="out", found=out)
    paths: list[str] = []

    def chosen(dataset: FederatedDataset) -> Sequence[str]:
        return select_clients([entry.id for entry in dataset.manifest.clients], clients)

    def save(client: str, model: PersonalModel) -> None:
        with storing(out):
            out.mkdir(parents=True, exist_ok=True)
        model.save(out / f"{client}{suffix}")
        paths.append(client)

    _, failures = _give(run, checkpoint, partition, data, predictor, chosen, save)
    return SavedModels(paths, failures)


def _give(
    run: Path,
    checkpoint: str,
    partition: str | Path | None,
    data: Sequence[Path],
    predictor: str,
    select: Callable[[FederatedDataset], Sequence[str]],
    use: Callable[[str, PersonalModel], None],
) -> tuple[Sequence[str], Mapping[str, str]]:
    """Personalize the chosen clients; return their ids, and the reason for each failure."""
    with torch_threads(1):  # restores the thread count, which is changed inside
        parts, evaluator, dataset = restore(run, checkpoint, partition, data)
        client_ids = select(dataset)
        for client in client_ids:
            dataset.manifest.entry(client)
        check_predictor(predictor, evaluator.predictors)
        e, problem = parts.experiment, Problem.from_json(about(parts, evaluator.folder).problem)
        digest = evaluator.checkpoints.load(evaluator.round).digest

        def make(client: ClientData, predictors: Mapping[str, Predictor]) -> None:
            card = card_of(
                problem,
                run=e.name,
                round=evaluator.round,
                digest=digest,
                algorithm=e.algorithm.name,
                predictor=predictor,
                model=e.model.name,
                client=client.id,
                standardizes=parts.standardizes,
            )
            use(client.id, PersonalModel(predictor_of(client.id, predictors, predictor), card))

        return client_ids, personalize_each(parts, evaluator, dataset, client_ids, make)
