"""Claim of a training's differential privacy: its unit, observers and draws, and what it does not cover.

An ε without an observer means little. A claim has two readings. *To readers*: everyone who sees the released models,
every client of the federation included; the random choice of cohorts is hidden from them and counts. *To the
aggregator*: if it adds the noise itself, it is trusted, and there is no guarantee. Otherwise the choice of a cohort
amplifies nothing, because the aggregator knows which clients take part. If examples are protected, both readings are
the same, because clients draw their examples in secret.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from fedloom.core.words import pluralize, rounded_up
from fedloom.privacy.accounting import Release, epsilon_of, neighbouring_relation
from fedloom.privacy.settings import TrainingPrivacy
from fedloom.privacy.spent import released
from fedloom.privacy.tally import Counts, is_same_for_all, largest

METRICS_UNCOVERED = "losses and metrics of evaluations, and the choice of the best round by them: they have no noise"
PERSONAL = (
    "values that stay with a client (its personal part, its state, its own fine-tuning): they depend on its data "
    "and get no noise; other clients' data reach them only through protected messages (joint differential privacy)"
)
AGGREGATOR_SEES = "it receives updates without noise, adds the noise, and is trusted"
AGGREGATOR_SEES_SUMS = "it receives sums over a cohort, adds the noise, and is trusted with these sums"


@dataclass(frozen=True)
class Reading:
    """Guarantee toward one kind of observer.

    Attributes
    ----------
    epsilon
        ε at the claim's δ; None: no guarantee.
    amplified
        True if the random choice of units counts, because it is hidden from this observer.
    because
        Reason why there is no guarantee; None if there is one.
    """

    epsilon: float | None
    amplified: bool
    because: str | None = None


@dataclass(frozen=True)
class Claim:
    """Differential privacy of a training, as ``summary.json`` has it.

    Attributes
    ----------
    unit
        Unit that is protected: a client with all its data, or one training example of a client.
    neighbouring
        Neighbouring data sets: ``add-or-remove-one`` unit (while numbers of units are public), or ``replace-one``.
    mechanism
        ``gaussian`` noise on sums of clipped terms, or shares of ``discrete-gaussian`` noise.
    clip, noise_multiplier
        Clipping norm C at the start, and the smallest noise multiplier of a sum; 0 if one had none.
    sampling
        Kinds of draws: ``poisson``, ``fixed``, ``all``.
    sums
        Number of noisy sums counted; of examples, that of the client with the largest ε.
    delta, epsilon
        δ, and the ε toward readers; None if there is no guarantee.
    to_readers, to_aggregator
        Guarantee toward everyone who sees the models, and toward the aggregator.
    covers, does_not_cover
        Messages and quantities that the ε covers, and those that it does not.
    noise
        Source of the noise: ``secret``, or the experiment's ``seed`` in a simulation, which protects nobody.
    releases
        Noisy sums by kind, as a ledger composes them; None if they are not known, or differ between clients.
    statement
        The claim in sentences.
    """

    unit: Literal["clients", "examples"]
    neighbouring: Literal["add-or-remove-one", "replace-one"]
    mechanism: Literal["gaussian", "discrete-gaussian"]
    clip: float
    noise_multiplier: float
    sampling: tuple[str, ...]
    sums: int
    delta: float
    epsilon: float | None
    to_readers: Reading
    to_aggregator: Reading
    covers: tuple[str, ...]
    does_not_cover: tuple[str, ...]
    noise: Literal["secret", "seed"]
    releases: tuple[Mapping[str, Any], ...] | None
    statement: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """Return the claim as an object of ``summary.json``."""
        lists = ("sampling", "covers", "does_not_cover", "statement")
        releases = None if self.releases is None else list(self.releases)
        return asdict(self) | {name: list(getattr(self, name)) for name in lists} | {"releases": releases}


def claim(
    settings: TrainingPrivacy,
    counts: Counts,
    *,
    simulated: bool,
    secure: bool = False,
    covers: Sequence[str] = (),
    does_not_cover: Sequence[str] = (),
    unknown: str | None = None,
) -> Claim:
    """Return the claim of a training with these noisy sums.

    Parameters
    ----------
    settings
        Keys of ``federation.privacy``.
    counts
        Releases and how often each happened, by client whose examples they are about; those about all clients under
        the name ``""``, which counts for every client.
    simulated
        True if the noise was derived from the experiment's seed.
    secure
        True if the aggregator sees sums only (``federation.secure_aggregation``).
    covers, does_not_cover
        Names of messages that are protected, and of those that are not; the latter are added to what no training
        protects.
    unknown
        Reason why not everything was counted; no ε is claimed then.
    """
    worst = largest(counts, settings.delta)
    noise_multiplier = min((r.noise_multiplier for r, n in worst.items() if n), default=math.inf)
    readers = _reading(worst, settings.delta, unknown, amplified=True)
    seen = AGGREGATOR_SEES_SUMS if secure else AGGREGATOR_SEES
    if settings.of == "examples":
        aggregator = readers  # the client adds the noise, and draws its examples in secret
    elif settings.noise == "central":
        aggregator = Reading(None, amplified=False, because=seen)
    else:
        known = Counter[Release]()
        for release, count in worst.items():
            known[release.without_sampling()] += count
        aggregator = _reading(known, settings.delta, unknown, amplified=False)
    found = Claim(
        unit=settings.of,
        neighbouring=neighbouring_relation(worst),
        mechanism="discrete-gaussian" if settings.noise == "distributed" else "gaussian",
        clip=settings.clip,
        noise_multiplier=0.0 if math.isinf(noise_multiplier) and not worst else noise_multiplier,
        sampling=tuple(sorted({release.sampling for release, count in worst.items() if count})),
        sums=sum(worst.values()),
        delta=settings.delta,
        epsilon=readers.epsilon,
        to_readers=readers,
        to_aggregator=aggregator,
        covers=tuple(covers),
        does_not_cover=(*does_not_cover, METRICS_UNCOVERED, PERSONAL),
        noise="seed" if simulated else "secret",
        releases=None if unknown is not None or not is_same_for_all(counts) else tuple(released(worst)),
    )
    return replace(found, statement=tuple(_sentences(found, worst)))


def _reading(counts: Mapping[Release, int], delta: float, unknown: str | None, *, amplified: bool) -> Reading:
    if unknown is not None:
        return Reading(None, amplified, unknown)
    epsilon = epsilon_of(counts, delta)
    if math.isinf(epsilon):
        return Reading(None, amplified, "a sum was released without noise")
    return Reading(epsilon, amplified)


def _sentences(found: Claim, counts: Mapping[Release, int]) -> Iterable[str]:
    yield _guarantee(found)
    yield _mechanism(found, counts)
    if not found.sums:
        yield "No noisy sum was released, because no round was trained."
    yield _toward_aggregator(found)
    yield f"Not covered: {'; '.join(found.does_not_cover)}."
    if found.noise == "seed":
        yield (
            "The noise was derived from the experiment's seed, as in a simulation: anyone who knows the seed can "
            "subtract it. The ε is that of secret noise of this size."
        )


def _guarantee(found: Claim) -> str:
    if found.epsilon is None:
        return f"No ε is claimed for training: {found.to_readers.because}."
    unit = "client, with all its data" if found.unit == "clients" else "training example of a client"
    change = "adding or removing" if found.neighbouring == "add-or-remove-one" else "replacing"
    return (
        f"Training is (ε = {rounded_up(found.epsilon)}, δ = {found.delta:g})-differentially private for {change} one "
        f"{unit}, toward everyone who sees the trained models."
    )


def _mechanism(found: Claim, counts: Mapping[Release, int]) -> str:
    term = "update of a client" if found.unit == "clients" else "gradient of an example"
    where = {
        ("clients", "gaussian"): "the aggregator adds noise to sums over a cohort",
        ("clients", "discrete-gaussian"): "each client adds a share of the noise before the sums are secure",
        ("examples", "gaussian"): "the client adds noise to sums over a mini-batch",
    }[found.unit, found.mechanism]
    return (
        f"Each {term} is clipped to norm {_number(found.clip)}; {where}, with noise multiplier "
        f"{_number(found.noise_multiplier)}. {pluralize(found.sums, 'noisy sum').capitalize()} counted{_draws(counts)}."
    )


def _draws(counts: Mapping[Release, int]) -> str:
    """Return the draws that happened, most frequent first, as the end of a sentence."""
    drawn = Counter[str]()
    for release, count in counts.items():
        drawn[_draw(release)] += count
    most = [text for text, _ in drawn.most_common(2)]
    rest = "" if len(drawn) <= 2 else f" and {pluralize(len(drawn) - 2, 'other draw')}"
    return f"; {' and '.join(most)}{rest}" if most else ""


def _draw(release: Release) -> str:
    of = "" if release.population is None else f" of {release.population:,}"
    if release.sampling == "all":
        return f"all{of} took part" if of else "all took part"
    if release.sampling == "poisson":
        return f"each{of} took part with probability {_number(release.rate)}, independently"
    return f"{release.cohort:,}{of} took part, drawn without replacement"


def _toward_aggregator(found: Claim) -> str:
    if found.unit == "examples":
        return "The same holds toward the aggregator: noise is added, and mini-batches are drawn, where the data are."
    if found.to_aggregator.epsilon is None:
        return f"Toward the aggregator there is no guarantee: {found.to_aggregator.because}."
    return (
        f"Toward the aggregator, which sees noisy sums only but knows who takes part, ε = "
        f"{rounded_up(found.to_aggregator.epsilon)} at the same δ."
    )


def _number(value: float) -> str:
    return f"{value:.3g}"
