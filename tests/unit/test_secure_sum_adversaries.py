"""Secure sums against an aggregator and members that do not follow the protocol."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from facts import refusing
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from secure_sum_adversary import Adversary, Lies, attack
from secure_sums import Session, parameters, total, vectors

from fedloom.errors import QuorumError, RefusedError
from fedloom.security.signing import KeySigner, KeyVerifier, NoSigner, NoVerifier, RegisteredKey
from fedloom.sums.secure_sum import OF_SEEDS, OF_SELF_MASK, SHARED_BYTES, SecureSumMember
from fedloom.sums.session import PUBLIC_BYTES

# --- knowledge of an aggregator and colluding members ----------------------------------------------------------------


def test_a_curious_aggregator_learns_only_the_sum_of_the_honest_survivors() -> None:
    n, colluders, last = 30, {3, 17, 21}, {5: 1, 9: 1, 26: 0, 12: 3}
    honest = sorted(set(range(n)) - colluders - {5, 9, 26})
    first, second = vectors(n, 400), vectors(n, 400)
    second[honest] = vectors(len(honest), 400, seed=1)
    second[honest[0]] += total(first, honest) - total(second, honest)  # other inputs with the same sum
    for values in (first, second):
        adversary = attack(Session(parameters(n, 20), values, last), colluders)
        ((members, learned),) = adversary.learns()
        assert members == set(honest)
        assert np.array_equal(learned, total(first, honest))
        for row in honest:
            seen, _, _ = adversary.residual(row)
            counts = np.bincount(seen.view(np.uint8), minlength=256)
            assert stats.chisquare(counts).pvalue > 1e-9
            assert abs(np.corrcoef(seen, values[row])[0, 1]) < 0.4


@pytest.mark.parametrize(("colluding", "learned"), [(2, [5]), (3, [4]), (4, [1, 1, 1])])
def test_t_colluding_members_of_a_complete_graph_know_all_masks(colluding: int, learned: list[int]) -> None:
    """The adversary of these tests finds whatever the parameters do not exclude: here t is 4."""
    adversary = attack(Session(parameters(7, threshold=4), vectors(7)), range(colluding))
    assert sorted(len(members) for members, _ in adversary.learns()) == learned
    for members, value in adversary.learns():
        assert np.array_equal(value, total(adversary.session.values, members))


def split_by_gaps(colluding: bool) -> Adversary:
    """Two gaps of k / 2 members each, which have dropped out, or of which one colludes."""
    session = Session(parameters(24, 4, 3), vectors(24))
    helpers: set[int] = set()

    def lies(ring: Sequence[int]) -> Lies:
        gaps = {ring[5], ring[6], ring[17], ring[18]}
        helpers.update({ring[5], ring[17]} if colluding else ())
        session.last |= dict.fromkeys(gaps - helpers, 1)
        return Lies()

    adversary = attack(session, (), lies)
    adversary.colluders = frozenset(helpers)
    return adversary


def test_colluding_members_at_the_bound_can_split_the_sum() -> None:
    """With c = 1, 2t = 6 does not exceed k + 2c: the colluding members help to unmask the edges of the gaps."""
    assert sorted(len(members) for members, _ in split_by_gaps(colluding=True).learns()) == [10, 10]
    assert split_by_gaps(colluding=False).learns() == []


def split_by_survivors(ring: Sequence[int], *, confirmed: bool) -> Lies:
    """Members 9 and 14 of the ring get survivors that include them, and their neighbours others that do not.

    So the masks between them and the members 0 to 7 are known, and yet they reveal shares.
    """
    absent = {6: {8}, 7: {8}, 0: {15}, 1: {15}}
    names = {"absent": absent, "dropped": absent | {8: {9}, 10: {9}, 11: {9}, 12: {14}, 13: {14}, 15: {14}}}
    rows = {name: {ring[i]: {ring[j] for j in js} for i, js in reported.items()} for name, reported in names.items()}
    return Lies(**rows, without_confirmations=not confirmed)


@pytest.mark.parametrize("confirmed", [False, True])
def test_different_survivors_for_different_members(confirmed: bool) -> None:
    session = Session(parameters(16, 4, 3), vectors(16))
    learned = attack(session, (), lambda ring: split_by_survivors(ring, confirmed=confirmed)).learns()
    assert [len(members) for members, _ in learned] == ([] if confirmed else [8])


def test_no_share_of_a_self_mask_without_a_receipt() -> None:
    session = Session(parameters(9, threshold=5), vectors(9))
    shares, present = session.share(*session.advertise())
    survivors, receipts = session.mask(shares, present)
    receipts[0, 3] = 0
    receipts[0, 4] ^= 1
    rows = session.members[0].unmask(session.confirm(survivors, receipts)[0])
    assert rows[:, 0].tolist() == [OF_SELF_MASK] * 3 + [0] * 2 + [OF_SELF_MASK] * 3
    assert not rows[3:5].any()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_inconsistent_aggregator_gets_one_sum(data: st.DataObject) -> None:
    """Random lies, by arcs of the ring, so that many members accept them; 2t > k + 2c."""
    n, k, t = data.draw(st.sampled_from([(12, 4, 3), (14, 6, 4), (14, 6, 5), (9, 8, 6), (8, 7, 4)]))
    p = parameters(n, k, t)
    session = Session(p, vectors(n, 2))
    places = st.integers(0, n - 1)
    colluder = {data.draw(places)} if 2 * t > k + 2 else set()
    arcs = sorted(data.draw(st.lists(places, min_size=1, max_size=3)))
    few = st.sets(places, max_size=n - p.minimum)
    views = [(data.draw(few), data.draw(few), data.draw(few)) for _ in arcs]
    session.last |= dict.fromkeys(data.draw(st.sets(places, max_size=1)) - colluder, data.draw(st.integers(1, 3)))

    def lies(ring: Sequence[int]) -> Lies:
        mine = {row: views[sum(place >= arc for arc in arcs) - 1] for place, row in enumerate(ring)}
        return Lies(
            absent={row: {ring[i] for i in absent} - {row} for row, (absent, _, _) in mine.items()},
            dropped={row: {ring[i] for i in dropped} - {row} for row, (_, dropped, _) in mine.items()},
            alive={row: {ring[i] for i in alive} for row, (_, _, alive) in mine.items()},
        )

    learned = attack(session, colluder, lies).learns()
    assert len(learned) <= 1
    for members, value in learned:
        assert len(members) > t - len(colluder)
        assert np.array_equal(value, total(session.values, members))


def test_a_member_never_reveals_both_secrets_of_another() -> None:
    session = Session(parameters(7), vectors(7))
    adversary = attack(session, (), Lies(dropped={i: {0} for i in (1, 2, 3)}))
    assert not all(adversary.secret(0, kind) for kind in (OF_SELF_MASK, OF_SEEDS))
    assert adversary.learns() == []


# --- refusals of members ----------------------------------------------------------------------------------------------


def test_a_step_answers_one_question() -> None:
    n = 7
    session = Session(parameters(n), vectors(n))
    member = session.members[0]
    with refusing(RefusedError, "mask"):
        member.mask(session.values[0].copy(), np.zeros((n - 1, SHARED_BYTES), np.uint8), np.ones(n - 1, bool))
    keys, signatures = session.advertise()
    assert np.array_equal(member.advertise()[0], keys[0])
    assert np.array_equal(member.share(keys, signatures), member.share(keys.copy(), signatures))
    fewer = keys.copy()
    fewer[6] = 0
    with pytest.raises(RefusedError):
        member.share(fewer, signatures)
    shares, present = session.share(keys, signatures)
    with refusing(RefusedError, "confirm"):
        member.confirm(np.ones(n, bool), np.zeros((n - 1, 16), np.uint8))
    with refusing(RefusedError, "unmask"):
        member.unmask(np.zeros((n - 1, 16), np.uint8))
    first = member.mask(session.values[0].copy(), shares[0], present[0])
    assert np.array_equal(first.values, member.mask(session.values[0].copy(), shares[0], present[0]).values)
    other = present[0].copy()
    other[0] = False
    for values, there in [(session.values[1], present[0]), (session.values[0], other)]:
        with pytest.raises(RefusedError):
            member.mask(values.copy(), shares[0], there)
    survivors, receipts = session.mask(shares, present)
    confirmation = member.confirm(survivors, receipts[0])
    assert np.array_equal(confirmation, member.confirm(survivors, receipts[0]))
    fewer_survive = survivors.copy()
    fewer_survive[6] = False
    for question in [(fewer_survive, receipts[0]), (survivors, np.zeros_like(receipts[0]))]:
        with pytest.raises(RefusedError):
            member.confirm(*question)
    confirmations = session.confirm(survivors, receipts)
    revealed = member.unmask(confirmations[0])
    partly = confirmations[0].copy()
    partly[0] = 0
    assert np.array_equal(revealed, member.unmask(partly))  # t are enough, and the answer is the same
    with pytest.raises(RefusedError):
        member.unmask(np.zeros_like(confirmations[0]))
    assert np.array_equal(session.unmask(confirmations), session.expected())


def test_impossible_survivors() -> None:
    n = 9
    session = Session(parameters(n, threshold=5), vectors(n), {8: 0, 7: -1})
    shares, present = session.share(*session.advertise())
    survivors, receipts = session.mask(shares, present)
    assert survivors.sum() == 7
    for wrong in [{0: False}, {7: True}, {8: True}, {5: False, 6: False}, dict.fromkeys(range(9), True)]:
        output = survivors.copy()
        output[list(wrong)] = list(wrong.values())
        with pytest.raises(RefusedError):
            session.members[0].confirm(output, receipts[0])
    assert np.array_equal(session.unmask(session.confirm(survivors, receipts)), session.expected())


def signed_members(n: int = 5, threshold: int = 4) -> tuple[list[SecureSumMember], list[Ed25519PrivateKey]]:
    """Return members whose keys are registered."""
    p, keys = parameters(n, threshold=threshold), [Ed25519PrivateKey.generate() for _ in range(n)]
    verifier = KeyVerifier([RegisteredKey(name, key.public_key()) for name, key in zip(p.members, keys, strict=True)])
    return [SecureSumMember(p, name, KeySigner(key), verifier) for name, key in zip(p.members, keys, strict=True)], keys


def test_the_aggregator_cannot_substitute_its_keys_for_a_members() -> None:
    members, keys = signed_members()
    output = [member.advertise() for member in members]
    roster, signatures = (np.stack(parts) for parts in zip(*output, strict=True))
    mallory = SecureSumMember(parameters(5, threshold=4), "m1", KeySigner(Ed25519PrivateKey.generate()), NoVerifier())
    another = SecureSumMember(parameters(5), "m1", KeySigner(keys[1]), NoVerifier())  # another session
    for forged in (mallory, another):
        keys_of, signature = forged.advertise()
        wrong, signed = roster.copy(), signatures.copy()
        wrong[1], signed[1] = keys_of, signature
        with refusing(RefusedError, "m1"):
            members[0].share(wrong, signed)
        wrong[1] = roster[1]
        with refusing(RefusedError, "m1"):
            members[0].share(wrong, signed)
    swapped, signed = roster.copy(), signatures.copy()
    swapped[[1, 2]], signed[[1, 2]] = roster[[2, 1]], signatures[[2, 1]]
    with pytest.raises(RefusedError):
        members[0].share(swapped, signed)
    own = roster.copy()
    own[0] = mallory.advertise()[0]
    with pytest.raises(RefusedError):
        members[0].share(own, signatures)
    own[0] = 0
    with pytest.raises(RefusedError):
        members[0].share(own, signatures)
    assert members[0].share(roster, signatures).any()  # the refusals have changed nothing


def test_a_member_unknown_to_others_is_left_out_of_the_sum() -> None:
    """It drops out, since no member shares anything with it; the others share no masks with it."""
    n, stranger = 6, 2
    members, _ = signed_members(n, threshold=3)
    session = Session(parameters(n, threshold=3), vectors(n), {stranger: 1})
    key = KeySigner(Ed25519PrivateKey.generate())  # not the registered one
    members[stranger] = SecureSumMember(session.parameters, f"m{stranger}", key, NoVerifier())
    session.members = members
    shares, present = session.share(*session.advertise())
    assert not shares[stranger].any()
    with refusing(RefusedError, "threshold"):
        members[stranger].mask(session.values[stranger].copy(), shares[stranger], present[stranger])
    assert np.array_equal(session.unmask(session.confirm(*session.mask(shares, present))), session.expected())


def test_impossible_rosters() -> None:
    session = Session(parameters(9), vectors(9))
    keys, signatures = session.advertise()
    for change in ({1: 0, 2: 0, 3: 0, 4: 0}, {1: keys[2]}, {1: keys[0]}):
        wrong = keys.copy()
        for row, value in change.items():
            wrong[row] = value
        with pytest.raises(RefusedError):
            session.members[0].share(wrong, signatures)
    small_order = keys.copy()
    small_order[1, :PUBLIC_BYTES] = [1] + [0] * (PUBLIC_BYTES - 1)
    with refusing(RefusedError, "1"):
        session.members[0].share(small_order, signatures)
    for shape in ((9, 63), (8, 64), (9, 64, 1)):
        with pytest.raises(RefusedError):
            session.members[0].share(np.zeros(shape, np.uint8), signatures)
    with pytest.raises(RefusedError):
        session.members[0].share(keys, signatures[:5])
    with refusing(RefusedError, "m9"):
        SecureSumMember(parameters(9), "m9", NoSigner(), NoVerifier())


def test_members_with_different_rosters_have_no_common_masks() -> None:
    n = 10
    session = Session(parameters(n, threshold=5), vectors(n))
    keys, signatures = session.advertise()
    without = keys.copy()
    without[9] = 0
    shared = {i: session.members[i].share(keys if i % 2 or i == 9 else without, signatures) for i in range(n)}
    received, present = session.aggregator.forward_shares(session.gather(1, shared), session.answering(1))
    for i in range(n):
        with pytest.raises(RefusedError):  # shares of those with the other roster are not for this member
            session.members[i].mask(
                session.values[i].copy(), received[i], present[i] & (session.aggregator.neighbours(i) < 9)
            )


def test_shares_sent_to_others_are_useless() -> None:
    session = Session(parameters(7), vectors(7))
    shares, present = session.share(*session.advertise())
    for wrong in (shares[1], shares[0][::-1], shares[0] ^ 1):
        with pytest.raises(RefusedError):
            session.members[0].mask(session.values[0].copy(), np.ascontiguousarray(wrong), present[0])
    with pytest.raises(RefusedError):
        session.members[0].mask(session.values[0].astype("<u8"), shares[0], present[0])


# --- members that do not follow the protocol -------------------------------------------------------------------------


def test_wrong_shares_are_corrected_if_there_are_enough() -> None:
    n = 13  # t = 9 of 12: one wrong share of each secret is corrected, two are not
    for liars, fine in (({4}, True), ({4, 7}, False)):
        session = Session(parameters(n), vectors(n), {2: 1})
        shares, present = session.share(*session.advertise())
        confirmations = session.confirm(*session.mask(shares, present))
        revealed = {i: session.members[i].unmask(confirmations[i]).copy() for i in session.rows(4)}
        for liar in liars:
            revealed[liar][:, 5] ^= 1
        rows, there = session.gather(4, revealed), session.answering(4)
        if fine:
            assert np.array_equal(session.aggregator.sum(rows, there), session.expected())
        else:
            with refusing(QuorumError, "9"):
                session.aggregator.sum(rows, there)
            there[list(liars)] = False
            assert np.array_equal(session.aggregator.sum(rows, there), session.expected())


def test_undecryptable_boxes_count_as_missing_shares() -> None:
    n = 10  # t = 7 of 9
    session = Session(parameters(n), vectors(n))
    keys, signatures = session.advertise()
    shared = {i: session.members[i].share(keys, signatures).copy() for i in range(n)}
    shared[3][:2, 0] ^= 1
    shares, present = session.aggregator.forward_shares(session.gather(1, shared), session.answering(1))
    assert np.array_equal(session.unmask(session.confirm(*session.mask(shares, present))), session.expected())


def test_the_aggregator_excludes_unusable_keys() -> None:
    n = 12
    session = Session(parameters(n, threshold=6), vectors(n), {0: -1, 1: -1, 2: -1})
    keys = session.gather(0, {i: session.members[i].advertise()[0] for i in range(n)})
    keys[0], keys[1], keys[2, :PUBLIC_BYTES] = 0, keys[5], [1] + [0] * (PUBLIC_BYTES - 1)
    roster = session.aggregator.roster(keys, np.ones(n, bool))
    assert set(np.flatnonzero(~roster.any(axis=1))) in ({0, 1, 2}, {0, 2, 5})


def test_unexpected_vectors() -> None:
    session = Session(parameters(7), vectors(7), {6: 0})
    shares, present = session.share(*session.advertise())
    masked = session.members[0].mask(session.values[0].copy(), shares[0], present[0])
    for wrong in (masked.values[:-1], masked.values.astype("<u8"), masked.values[None]):
        with pytest.raises(RefusedError):
            session.aggregator.add(0, type(masked)(wrong, masked.receipts))
    session.aggregator.add(0, masked)
    for row in (0, 6):
        with refusing(RefusedError, f"m{row}"):
            session.aggregator.add(row, masked)
