"""The Merkle tree of RFC 9162: published roots and proofs, a naive tree, and forged proofs."""

import hashlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_agg.transparency import EMPTY_ROOT, Frontier, Tree, is_consistent, leaf_hash, root_of_inclusion

# The eight entries, roots and proofs of the reference implementation (google/certificate-transparency,
# merkle_tree_test.cc; the same in transparency-dev/merkle), computed there and not by this code.
ENTRIES = [
    bytes.fromhex(each)
    for each in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
INCLUSION = {
    (0, 1): [],
    (0, 8): [
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ],
    (5, 8): [
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
    (2, 3): ["fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"],
    (1, 5): [
        "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    ],
}
CONSISTENCY = {
    (1, 1): [],
    (1, 8): [
        "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    ],
    (6, 8): [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ],
    (2, 5): [
        "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    ],
}


def naive_root(entries: list[bytes]) -> bytes:
    """The definition of RFC 9162, section 2.1.1, word for word."""
    if not entries:
        return hashlib.sha256(b"").digest()
    if len(entries) == 1:
        return hashlib.sha256(b"\x00" + entries[0]).digest()
    k = 1
    while 2 * k < len(entries):
        k *= 2
    return hashlib.sha256(b"\x01" + naive_root(entries[:k]) + naive_root(entries[k:])).digest()


def naive_inclusion(m: int, entries: list[bytes]) -> list[bytes]:
    """Section 2.1.3.1."""
    if len(entries) == 1:
        return []
    k = 1
    while 2 * k < len(entries):
        k *= 2
    if m < k:
        return [*naive_inclusion(m, entries[:k]), naive_root(entries[k:])]
    return [*naive_inclusion(m - k, entries[k:]), naive_root(entries[:k])]


def naive_consistency(m: int, entries: list[bytes], whole: bool = True) -> list[bytes]:
    """Section 2.1.4.1."""
    n = len(entries)
    if m == n:
        return [] if whole else [naive_root(entries)]
    k = 1
    while 2 * k < n:
        k *= 2
    if m <= k:
        return [*naive_consistency(m, entries[:k], whole), naive_root(entries[k:])]
    return [*naive_consistency(m - k, entries[k:], False), naive_root(entries[:k])]


def entries_of(size: int) -> list[bytes]:
    return [f"entry {number}".encode() for number in range(size)]


def tree_of(entries: list[bytes]) -> Tree:
    return Tree(map(leaf_hash, entries))


def test_the_published_roots() -> None:
    tree = tree_of(ENTRIES)
    assert tree.root(0) == EMPTY_ROOT == bytes.fromhex(hashlib.sha256().hexdigest())
    assert [tree.root(size).hex() for size in range(1, 9)] == ROOTS
    frontier = Frontier()
    for entry, root in zip(ENTRIES, ROOTS, strict=True):
        frontier = frontier.grown([leaf_hash(entry)])
        assert frontier.root.hex() == root


@pytest.mark.parametrize(("index", "size"), INCLUSION)
def test_the_published_inclusion_proofs(index: int, size: int) -> None:
    proof = tree_of(ENTRIES).inclusion(index, size)
    assert [each.hex() for each in proof] == INCLUSION[index, size]
    assert root_of_inclusion(leaf_hash(ENTRIES[index]), index, size, proof) == bytes.fromhex(ROOTS[size - 1])


@pytest.mark.parametrize(("old", "new"), CONSISTENCY)
def test_the_published_consistency_proofs(old: int, new: int) -> None:
    proof = tree_of(ENTRIES).consistency(old, new)
    assert [each.hex() for each in proof] == CONSISTENCY[old, new]
    assert is_consistent(old, bytes.fromhex(ROOTS[old - 1]), new, bytes.fromhex(ROOTS[new - 1]), proof)


def test_every_proof_of_every_small_tree_is_that_of_the_definition() -> None:
    for size in range(1, 20):
        entries = entries_of(size)
        tree, root = tree_of(entries), naive_root(entries)
        assert tree.root() == root
        assert tree.frontier == Frontier().grown(map(leaf_hash, entries))
        for index in range(size):
            proof = tree.inclusion(index, size)
            assert list(proof) == naive_inclusion(index, entries)
            assert root_of_inclusion(leaf_hash(entries[index]), index, size, proof) == root
        for old in range(1, size + 1):
            consistency = tree.consistency(old, size)
            assert list(consistency) == naive_consistency(old, entries)
            assert is_consistent(old, naive_root(entries[:old]), size, root, consistency)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_a_tree_of_any_size_proves_its_growth(one: int, other: int, more: int) -> None:
    old, new = sorted((one, other))
    entries = entries_of(new + more)
    tree = tree_of(entries)
    assert tree.root(old) == naive_root(entries[:old])
    assert is_consistent(old, tree.root(old), new, tree.root(new), tree.consistency(old, new))
    frontier = Frontier().grown(map(leaf_hash, entries[:old])).grown(map(leaf_hash, entries[old:new]))
    assert (frontier.size, frontier.root) == (new, tree.root(new))
    if new:
        index = old % new
        proof = tree.inclusion(index, new)
        assert root_of_inclusion(leaf_hash(entries[index]), index, new, proof) == tree.root(new)


def test_a_log_that_changed_an_old_entry_has_no_proof() -> None:
    """No proof of either tree, nor any mixture of the two, shows growth from one to the other."""
    honest = entries_of(11)
    for altered, old in itertools.product(range(7), (4, 7)):
        if altered >= old:
            continue
        other = [b"invented" if number == altered else entry for number, entry in enumerate(honest)]
        here, there = tree_of(honest), tree_of(other)
        proofs = [here.consistency(old, 11), there.consistency(old, 11)]
        for mixed in itertools.product(*zip(*proofs, strict=True)):
            assert not is_consistent(old, here.root(old), 11, there.root(11), mixed)


def test_bent_proofs_are_refused() -> None:
    tree, size = tree_of(entries_of(13)), 13
    for index in range(size):
        leaf, proof = leaf_hash(f"entry {index}".encode()), tree.inclusion(index, size)
        root = tree.root()
        bent: list[tuple[bytes, ...]] = [proof[:-1], (*proof, bytes(32)), proof[1:], (*proof, proof[-1])]
        bent += [tuple(reversed(proof))] if len(set(proof)) > 1 else []
        bent += [(*proof[:at], bytes(32), *proof[at + 1 :]) for at in range(len(proof))]
        bent += [(*proof[:at], proof[at][:31], *proof[at + 1 :]) for at in range(len(proof))]
        assert all(root_of_inclusion(leaf, index, size, each) != root for each in bent)
        # The same proof for another place, or for a node passed off as a leaf.
        assert all(root_of_inclusion(leaf, other, size, proof) != root for other in range(size + 2) if other != index)
        assert root_of_inclusion(leaf_hash(b"invented"), index, size, proof) != root
    for old in range(1, size):
        proof = tree.consistency(old, size)
        was, root = tree.root(old), tree.root()
        bent = [proof[:-1], (*proof, bytes(32)), proof[1:], ()]
        bent += [(*proof[:at], bytes(32), *proof[at + 1 :]) for at in range(len(proof))]
        assert not any(is_consistent(old, was, size, root, each) for each in bent)
        assert not is_consistent(old, bytes(32), size, root, proof)
        assert not is_consistent(old, was, size, bytes(32), proof)
        assert not is_consistent(size, root, old, was, proof)
        assert not any(is_consistent(other, was, size, root, proof) for other in range(size + 1) if other != old)


def test_an_inner_node_is_no_entry() -> None:
    entries = entries_of(4)
    tree = tree_of(entries)
    # With one kind of hash, the concatenation of two leaves would pass as the entry of a smaller tree.
    pair = leaf_hash(entries[0]) + leaf_hash(entries[1])
    assert leaf_hash(pair) != tree.root(2)
    assert Tree([leaf_hash(pair), leaf_hash(leaf_hash(entries[2]) + leaf_hash(entries[3]))]).root() != tree.root()


def test_the_empty_log_and_impossible_sizes() -> None:
    tree = tree_of(entries_of(3))
    assert is_consistent(0, EMPTY_ROOT, 3, tree.root(), ())
    assert is_consistent(0, EMPTY_ROOT, 0, EMPTY_ROOT, ())
    assert not is_consistent(0, bytes(32), 3, tree.root(), ())
    assert not is_consistent(0, EMPTY_ROOT, 0, tree.root(), ())
    assert not is_consistent(-1, EMPTY_ROOT, 3, tree.root(), ())
    assert root_of_inclusion(bytes(32), 0, 0, ()) is None
    for call in (
        lambda: tree.root(4),
        lambda: tree.inclusion(3, 3),
        lambda: tree.consistency(2, 1),
        lambda: tree.consistency(2, 4),
    ):
        with pytest.raises(ValueError, match="log"):
            call()
    with pytest.raises(ValueError, match="32 bytes"):
        Tree([b"short"])
    with pytest.raises(ValueError, match="peaks"):
        Frontier(3, (bytes(32),))
