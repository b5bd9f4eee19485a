"""Claim of a training's differential privacy: its unit, observers and draws, and what it does not cover.

An ε without an observer means little. A claim has three readings. *To readers*: everyone who sees the released models;
the random choice of cohorts is hidden from them and counts. *To members*: a client of the federation also knows when it
was drawn itself and, in a secure sum, with whom; there sampling hides nothing, and of noise in shares it knows its own.
*To the aggregator*: if it adds the noise itself, it is trusted, and there is no guarantee. Otherwise the choice of a
cohort amplifies nothing, because the aggregator knows which clients take part. If examples are protected, all readings
are the same, because clients add the noise and draw their examples in secret.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from fedloom.core.words import pluralize, rounded_up
from fedloom.privacy.accounting import Release, epsilon_of, neighbouring_relation
from fedloom.privacy.settings import TrainingPrivacy
from fedloom.privacy.spent import released
from fedloom.privacy.tally import Cohorts, Counts, is_same_for_all, largest, toward_members

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
    to_readers, to_members, to_aggregator
        Guarantee toward everyone who sees the models, toward each client of the federation (the one against which it is
        weakest), and toward the aggregator.
    member_cohorts
        Number of sums whose cohorts that client knows.
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
    to_members: Reading
    to_aggregator: Reading
    member_cohorts: int
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
    cohorts: Cohorts | None = None,
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
        True if the aggregator sees sums only (``federation.secure_aggregation``), and members the cohorts.
    cohorts
        Cohorts of these sums; None if every member may know all of them.
    covers, does_not_cover
        Names of messages that are protected, and of those that are not; the latter are added to what no training
        protects.
    unknown
        Reason why not everything was counted; no ε is claimed then.
    """
    worst = largest(counts, settings.delta)
    noise_multiplier = min((r.noise_multiplier for r, n in worst.items() if n), default=math.inf)
    readings = readings_of(settings, worst, cohorts, secure=secure, unknown=unknown)
    result = Claim(
        unit=settings.of,
        neighbouring=neighbouring_relation(worst),
        mechanism="discrete-gaussian" if settings.noise == "distributed" else "gaussian",
        clip=settings.clip,
        noise_multiplier=0.0 if math.isinf(noise_multiplier) and not worst else noise_multiplier,
        sampling=tuple(sorted({release.sampling for release, count in worst.items() if count})),
        sums=sum(worst.values()),
        delta=settings.delta,
        epsilon=readings.readers.epsilon,
        to_readers=readings.readers,
        to_members=readings.members,
        to_aggregator=readings.aggregator,
        member_cohorts=readings.member_cohorts,
        covers=tuple(covers),
        does_not_cover=(*does_not_cover, METRICS_UNCOVERED, PERSONAL),
        noise="seed" if simulated else "secret",
        releases=None if unknown is not None or not is_same_for_all(counts) else tuple(released(worst)),
    )
    return replace(result, statement=tuple(_sentences(result, worst)))


class Readings(NamedTuple):
    """Guarantees toward each kind of observer, and the number of cohorts that a member knows."""

    readers: Reading
    members: Reading
    aggregator: Reading
    member_cohorts: int


def readings_of(
    settings: TrainingPrivacy,
    counts: Mapping[Release, int],
    cohorts: Cohorts | None,
    *,
    secure: bool,
    unknown: str | None = None,
) -> Readings:
    """Return the guarantees of these releases; parameters as in :func:`claim`.

    A member of secure sums knows the cohorts that it was in. The guarantee is that toward the member that learns most.
    """

    def reading(seen: Mapping[Release, int], *, amplified: bool) -> Reading:
        return _reading(seen, settings.delta, unknown, amplified=amplified)

    readers = reading(counts, amplified=True)
    if settings.of == "examples":  # clients add the noise, and draw their examples in secret
        return Readings(readers, readers, readers, 0)
    shares = 0
    if settings.noise == "distributed":
        shares = (cohorts or Cohorts()).shares
        counts_known = Counter[Release]()
        for release, count in counts.items():
            counts_known[release.without_sampling()] += count
        aggregator = reading(counts_known, amplified=False)
    else:
        aggregator = Reading(None, amplified=False, because=AGGREGATOR_SEES_SUMS if secure else AGGREGATOR_SEES)
    each = (cohorts.most() if cohorts is not None else [Counter(counts)]) if secure else [Counter[Release]()]
    readings = [
        (
            reading(toward_members(counts, counts_known, shares), amplified=not any(counts_known.values())),
            sum(counts_known.values()),
        )
        for counts_known in each
    ]
    members, cohort_count = max(readings, key=lambda one: math.inf if one[0].epsilon is None else one[0].epsilon)
    return Readings(readers, members, aggregator, cohort_count)


def _reading(counts: Mapping[Release, int], delta: float, unknown: str | None, *, amplified: bool) -> Reading:
    if unknown is not None:
        return Reading(None, amplified, unknown)
    epsilon = epsilon_of(counts, delta)
    if math.isinf(epsilon):
        return Reading(None, amplified, "a sum was released without noise")
    return Reading(epsilon, amplified)


def _sentences(claim: Claim, counts: Mapping[Release, int]) -> Iterable[str]:
    yield _guarantee(claim)
    yield _mechanism(claim, counts)
    if not claim.sums:
        yield "No noisy sum was released, because no round was trained."
    if claim.unit == "clients" and claim.epsilon is not None:
        yield _toward_members_in_words(claim)
    yield _toward_aggregator(claim)
    yield f"Not covered: {'; '.join(claim.does_not_cover)}."
    if claim.noise == "seed":
        yield (
            "The noise was derived from the experiment's seed, as in a simulation: anyone who knows the seed can "
            "subtract it. The ε is that of secret noise of this size."
        )


def _guarantee(claim: Claim) -> str:
    if claim.epsilon is None:
        return f"No ε is claimed for training: {claim.to_readers.because}."
    unit = "client, with all its data" if claim.unit == "clients" else "training example of a client"
    change = "adding or removing" if claim.neighbouring == "add-or-remove-one" else "replacing"
    return (
        f"Training is (ε = {rounded_up(claim.epsilon)}, δ = {claim.delta:g})-differentially private for {change} one "
        f"{unit}, toward everyone who sees the trained models."
    )


def _mechanism(claim: Claim, counts: Mapping[Release, int]) -> str:
    term = "update of a client" if claim.unit == "clients" else "gradient of an example"
    locations = {
        ("clients", "gaussian"): "the aggregator adds noise to sums over a cohort",
        ("clients", "discrete-gaussian"): "each client adds a share of the noise before the sums are secure",
        ("examples", "gaussian"): "the client adds noise to sums over a mini-batch",
    }[claim.unit, claim.mechanism]
    return (
        f"Each {term} is clipped to norm {_number(claim.clip)}; {locations}, with noise multiplier "
        f"{_number(claim.noise_multiplier)}. {pluralize(claim.sums, 'noisy sum').capitalize()} counted{_draws(counts)}."
    )


def _draws(counts: Mapping[Release, int]) -> str:
    """Return the draws that happened, most frequent first, as the end of a sentence."""
    draw_counts = Counter[str]()
    for release, count in counts.items():
        draw_counts[_draw(release)] += count
    most = [text for text, _ in draw_counts.most_common(2)]
    rest = "" if len(draw_counts) <= 2 else f" and {pluralize(len(draw_counts) - 2, 'other draw')}"
    return f"; {' and '.join(most)}{rest}" if most else ""


def _draw(release: Release) -> str:
    population = "" if release.population is None else f" of {release.population:,}"
    if release.sampling == "all":
        return f"all{population} took part" if population else "all took part"
    if release.sampling == "poisson":
        return f"each{population} took part with probability {_number(release.rate)}, independently"
    return f"{release.cohort:,}{population} took part, drawn without replacement"


def _toward_members_in_words(claim: Claim) -> str:
    epsilon_text = "no ε" if claim.to_members.epsilon is None else f"ε = {rounded_up(claim.to_members.epsilon)}"
    if not claim.member_cohorts:
        return f"Toward other clients of the federation, which do not know the cohorts, {epsilon_text} at the same δ."
    own = ", and its own share of their noise" if claim.mechanism == "discrete-gaussian" else ""
    return (
        f"Toward another client of the federation, {epsilon_text} at the same δ: it knows who took part in the "
        f"{pluralize(claim.member_cohorts, 'sum')} that it took part in itself{own}. For clients that tell each other, "
        "the sums of all of them count."
    )


def _toward_aggregator(claim: Claim) -> str:
    if claim.unit == "examples":
        return (
            "The same holds toward members and the aggregator: noise is added, and mini-batches are drawn, where the "
            "data are."
        )
    if claim.to_aggregator.epsilon is None:
        return f"Toward the aggregator there is no guarantee: {claim.to_aggregator.because}."
    return (
        f"Toward the aggregator, which sees noisy sums only but knows who takes part, ε = "
        f"{rounded_up(claim.to_aggregator.epsilon)} at the same δ."
    )


def _number(value: float) -> str:
    return f"{value:.3g}"
