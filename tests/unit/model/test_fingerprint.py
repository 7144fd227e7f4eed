"""Fingerprints: canonical form, differences, what is missing, the compatibility table,
validation.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.model.fingerprint import (
    CONVERTIBLE_FIELDS,
    FIELDS,
    NO_CPU_ISA,
    ORDER_HEADS,
    ORDER_LATENT,
    UNIT_SCALES,
    Difference,
    Encoding,
    Fingerprint,
    Geometry,
    Identity,
    Placement,
    Verdict,
    attention_kind,
    compare,
)
from kvstore.model.reasons import BadRequest, Reason

FULL = Fingerprint(
    Identity("model/a", "rev-1", 3, "adapter", "sha256:aa", "sha256:cc"),
    Geometry("gqa", 32, 8, 128, cache_group="full", window_tokens=128),
    Encoding("bfloat16", 16, ORDER_HEADS, UNIT_SCALES, "1", "flash", NO_CPU_ISA, "raw"),
    Placement(2, 1, 1),
)
LATENT = Fingerprint(
    Identity("model/b", "rev-1", config_digest="sha256:cc"),
    Geometry("mla", 61, 1, 0, kv_latent_size=512, rope_size=64),
    Encoding("bfloat16", 16, ORDER_LATENT),
)
MINIMAL = Fingerprint(Identity("m"), Geometry("mha", 1, 1, 1), Encoding("float32", 1))

OTHER: dict[str, Any] = {
    "geometry.attention": "mha",
    "encoding.kv_dtype": "float16",
}
LATENT_FIELDS = ("geometry.kv_latent_size", "geometry.rope_size")


def changed(fingerprint: Fingerprint, **fields: Any) -> Fingerprint:
    """A copy with fields given as group__name=value."""
    for dotted, value in fields.items():
        group, name = dotted.split("__")
        part = dataclasses.replace(getattr(fingerprint, group), **{name: value})
        fingerprint = dataclasses.replace(fingerprint, **{group: part})
    return fingerprint


def base_and_flipped(field: str) -> tuple[Fingerprint, Fingerprint]:
    base = LATENT if field in LATENT_FIELDS else FULL
    value = base.value(field)
    other = OTHER.get(field, value + 1 if isinstance(value, int) else f"{value}'")
    return base, changed(base, **{field.replace(".", "__"): other})


def refused(call: Any, *args: Any, **kwargs: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        call(*args, **kwargs)
    assert caught.value.setting is not None
    return caught.value


# ---------------------------------------------------------------- mutation of each field


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_alone_changes_the_digest_and_is_named(field: str) -> None:
    base, flipped = base_and_flipped(field)
    group = field.partition(".")[0]
    assert base.missing() == flipped.missing() == ()
    assert flipped.digest != base.digest
    assert flipped != base
    assert base.differences(flipped) == (
        Difference(field, base.value(field), flipped.value(field), group),
    )
    before, after = base.group_digests(), flipped.group_digests()
    assert [name for name in before if before[name] != after[name]] == [group]


@pytest.mark.parametrize("field", FIELDS)
def test_the_compatibility_table(field: str) -> None:
    base, flipped = base_and_flipped(field)
    group = field.partition(".")[0]
    assert compare(base, flipped).verdict is Verdict.INCOMPATIBLE
    assert compare(base, flipped, CONVERTIBLE_FIELDS - {field}).verdict is Verdict.INCOMPATIBLE
    with_converters = compare(base, flipped, CONVERTIBLE_FIELDS)
    bridged = group in ("encoding", "placement")
    assert with_converters.verdict is (Verdict.CONVERTIBLE if bridged else Verdict.INCOMPATIBLE)
    assert [d.field for d in with_converters.differences] == [field]


def test_equal_ones_match_whatever_converters_there_are() -> None:
    again = Fingerprint.from_dict(FULL.to_dict())
    for convertible in (frozenset[str](), CONVERTIBLE_FIELDS):
        result = compare(FULL, again, convertible)
        assert (result.verdict, result.differences) == (Verdict.MATCH, ())


def test_all_differing_fields_must_be_convertible() -> None:
    offered = changed(FULL, encoding__kv_dtype="float16", placement__tensor_parallel=4)
    both = frozenset({"encoding.kv_dtype", "placement.tensor_parallel"})
    assert compare(FULL, offered, both).verdict is Verdict.CONVERTIBLE
    for one in both:
        assert compare(FULL, offered, frozenset({one})).verdict is Verdict.INCOMPATIBLE
    worse = changed(offered, identity__weight_epoch=4)
    assert compare(FULL, worse, both).verdict is Verdict.INCOMPATIBLE


@pytest.mark.parametrize("field", ["identity.weights_revision", "geometry.layers", "nonsense"])
def test_identity_and_geometry_can_never_be_declared_convertible(field: str) -> None:
    refused(compare, FULL, FULL, frozenset({field}))


# ---------------------------------------------------------------- missing fields


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"identity__weights_revision": None}, ("identity.weights_revision",)),
        ({"identity__config_digest": None}, ("identity.config_digest",)),
        ({"identity__adapter_digest": None}, ("identity.adapter_digest",)),
        ({"identity__adapter_digest": None, "identity__adapter_name": None}, ()),
        ({"encoding__scales_digest": None}, ()),
        (
            {"encoding__kv_dtype": "float8_e4m3fn", "encoding__scales_digest": None},
            ("encoding.scales_digest",),
        ),
        ({"encoding__kv_dtype": "int8"}, ()),
        ({"encoding__codec": None}, ()),
        ({"encoding__layout_version": None}, ()),
        ({"encoding__attention_backend": None}, ()),
        ({"encoding__cpu_isa": None}, ()),
        ({"encoding__element_order": None}, ("encoding.element_order",)),
        ({"encoding__element_order": "LBNHC"}, ()),
        (
            {"encoding__element_order": "LBNHC", "encoding__layout_version": None},
            ("encoding.layout_version",),
        ),
        (
            {"encoding__element_order": "LBNHC", "encoding__attention_backend": None},
            ("encoding.attention_backend",),
        ),
        ({"encoding__element_order": "LBHNC", "encoding__cpu_isa": None}, ("encoding.cpu_isa",)),
    ],
)
def test_missing_names_what_is_required(fields: dict[str, Any], missing: tuple[str, ...]) -> None:
    offer = changed(FULL, **fields)
    assert offer.missing() == missing
    assert offer.digest != FULL.digest
    if missing:
        assert compare(offer, offer).verdict is Verdict.HELD
    else:
        assert compare(offer, offer).verdict is Verdict.MATCH


def test_an_unknown_revision_is_held_against_anything_it_could_be() -> None:
    offer = changed(FULL, identity__weights_revision=None)
    for stored, offered in ((FULL, offer), (offer, FULL), (offer, offer)):
        assert compare(stored, offered).verdict is Verdict.HELD
    assert [d.field for d in compare(FULL, offer).differences] == ["identity.weights_revision"]


def test_a_known_difference_outweighs_an_unknown_one() -> None:
    offer = changed(FULL, identity__weights_revision=None, geometry__head_size=64)
    assert compare(FULL, offer).verdict is Verdict.INCOMPATIBLE
    bridged = changed(FULL, identity__weights_revision=None, encoding__block_tokens=32)
    assert compare(FULL, bridged).verdict is Verdict.INCOMPATIBLE
    assert compare(FULL, bridged, CONVERTIBLE_FIELDS).verdict is Verdict.HELD


def test_complete_fills_the_revision_and_nothing_else() -> None:
    offer = changed(FULL, identity__weights_revision=None)
    assert offer.complete("rev-1") == FULL
    assert offer.complete("rev-1").digest == FULL.digest
    assert offer.complete("rev-2").digest != FULL.digest
    assert changed(offer, identity__config_digest=None).complete("rev-1").missing() == (
        "identity.config_digest",
    )
    refused(FULL.complete, "rev-1")
    refused(offer.complete, "")
    refused(offer.complete, None)


# ---------------------------------------------------------------- adapters and types (P02, P08)


def test_adapters_are_told_apart_by_content() -> None:
    def with_adapter(name: str | None, digest: str | None) -> Fingerprint:
        identity = dataclasses.replace(FULL.identity, adapter_name=name, adapter_digest=digest)
        return dataclasses.replace(FULL, identity=identity)

    stored = with_adapter("x", "digest-1")
    assert compare(stored, with_adapter("x", "digest-1")).verdict is Verdict.MATCH
    for other in (
        with_adapter(None, None),
        with_adapter("y", "digest-2"),
        with_adapter("x", "digest-2"),
    ):
        assert compare(stored, other).verdict is Verdict.INCOMPATIBLE
    assert compare(stored, with_adapter("x", None)).verdict is Verdict.HELD
    assert refused(with_adapter, None, "digest-1").setting == "identity.adapter_name"


def test_types_of_equal_size_do_not_meet() -> None:
    two = [changed(FULL, encoding__kv_dtype=t) for t in ("float8_e4m3fn", "float8_e5m2", "int8")]
    assert len({f.digest for f in [FULL, *two]}) == 4
    assert compare(two[0], two[1]).verdict is Verdict.INCOMPATIBLE


# ---------------------------------------------------------------- canonical bytes


NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=12)
OPTIONAL = st.none() | NAMES


@st.composite
def identities(draw: st.DrawFn) -> Identity:
    adapter = draw(OPTIONAL)
    return Identity(
        draw(NAMES),
        draw(OPTIONAL),
        draw(st.integers(0, 3)),
        adapter,
        None if adapter is None else draw(OPTIONAL),
        draw(OPTIONAL),
    )


@given(identities(), identities())
def test_canonical_bytes_are_injective(one: Identity, other: Identity) -> None:
    assert (one.canonical() == other.canonical()) == (one == other)


@given(identities())
def test_dictionary_round_trip(identity: Identity) -> None:
    fingerprint = dataclasses.replace(FULL, identity=identity)
    data = json.loads(json.dumps(fingerprint.to_dict()))
    again = Fingerprint.from_dict(data)
    assert again == fingerprint
    assert again.digest == fingerprint.digest


def test_absent_fields_are_left_out_and_null_counts_as_absent() -> None:
    data = MINIMAL.to_dict()
    assert data["identity"] == {"model_name": "m", "weight_epoch": 0}
    nulls: dict[str, Any] = json.loads(json.dumps(data))
    nulls["identity"]["weights_revision"] = None
    assert Fingerprint.from_dict(nulls) == MINIMAL
    del nulls["placement"]
    assert Fingerprint.from_dict(nulls) == MINIMAL


def test_neighbouring_fields_cannot_run_into_each_other() -> None:
    one = Identity("ab", "c", config_digest="d")
    other = Identity("a", "bc", config_digest="d")
    swapped = Identity("ab", None, config_digest="c")
    assert len({i.digest() for i in (one, other, swapped, Identity("ab", "c"))}) == 4


def test_equal_texts_and_numbers_differ() -> None:
    assert changed(FULL, encoding__layout_version="None").digest != (
        changed(FULL, encoding__layout_version=None).digest
    )


# ---------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("identity", "colour"), "red"),
        (("colour",), {"red": 1}),
        (("identity", "model_name"), None),
        (("identity", "model_name"), 7),
        (("identity", "weight_epoch"), "7"),
        (("identity", "weight_epoch"), True),
        (("identity", "weight_epoch"), 1.0),
        (("identity", "weight_epoch"), -1),
        (("identity", "weight_epoch"), 2**63),
        (("identity", "weights_revision"), ""),
        (("identity", "weights_revision"), ["x"]),
        (("identity",), "text"),
        (("geometry", "attention"), "linear"),
        (("geometry", "attention"), ["gqa"]),
        (("geometry", "attention"), "mqa"),
        (("geometry", "attention"), "mla"),
        (("geometry", "layers"), 0),
        (("geometry", "layers"), None),
        (("geometry", "kv_heads"), 0),
        (("geometry", "head_size"), 0),
        (("geometry", "kv_latent_size"), 1),
        (("geometry", "rope_size"), 1),
        (("geometry", "window_tokens"), -1),
        (("geometry", "cache_group"), "a\nb"),
        (("geometry", "cache_group"), 1),
        (("encoding", "kv_dtype"), "bf16"),
        (("encoding", "kv_dtype"), "torch.bfloat16"),
        (("encoding", "kv_dtype"), ["float32"]),
        (("encoding", "kv_dtype"), None),
        (("encoding", "block_tokens"), 0),
        (("encoding", "block_tokens"), 65_537),
        (("encoding", "element_order"), ORDER_LATENT),
        (("encoding", "codec"), 0),
        (("placement", "tensor_parallel"), 0),
        (("placement", "context_parallel"), "1"),
    ],
    ids=str,
)
def test_wrong_dictionaries_are_refused_by_field(path: tuple[str, ...], value: Any) -> None:
    data: dict[str, Any] = json.loads(json.dumps(FULL.to_dict()))
    target = data
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = value
    error = refused(Fingerprint.from_dict, data)
    assert path[0] in str(error)


@pytest.mark.parametrize("group", ["identity", "geometry", "encoding"])
def test_groups_without_defaults_are_required(group: str) -> None:
    data: dict[str, Any] = FULL.to_dict()
    del data[group]
    assert str(refused(Fingerprint.from_dict, data).setting).startswith(f"{group}.")


@pytest.mark.parametrize("data", [None, [], "text", 1])
def test_other_things_than_tables_are_refused(data: Any) -> None:
    refused(Fingerprint.from_dict, data)


def test_unknown_names_are_printed_harmlessly() -> None:
    error = refused(Fingerprint.from_dict, {"a\nERROR forged line" + "x" * 500: {}})
    assert "\n" not in str(error)
    assert len(str(error)) < 300


@pytest.mark.parametrize("size", [1, 255, 256])
def test_names_up_to_the_limit_work(size: int) -> None:
    name = "n" * size
    fingerprint = changed(FULL, identity__model_name=name)
    assert Fingerprint.from_dict(fingerprint.to_dict()).identity.model_name == name


@pytest.mark.parametrize(
    "name", ["/a/../b", "..", "modèle", "\U0001f600" * 64, "a b", "\u200fright", "é" * 128]
)
def test_odd_names_work(name: str) -> None:
    fingerprint = changed(FULL, identity__model_name=name)
    assert Fingerprint.from_dict(fingerprint.to_dict()) == fingerprint


@pytest.mark.parametrize(
    "name",
    [
        "",
        "n" * 257,
        "n" * 4_096,
        "é" * 129,
        "a\0b",
        "a\nb",
        "\x1b[31m",
        "\x7f",
        "\x85",
        "\u2028",
        "\ud800",
        "\U0001f600" * 65,
    ],
    ids=ascii,
)
def test_bad_names_are_refused(name: str) -> None:
    error = refused(changed, FULL, identity__model_name=name)
    assert error.reason is Reason.BAD_NAME
    assert error.setting == "identity.model_name"
    assert str(error).isprintable()


def test_groups_must_be_of_their_types() -> None:
    refused(Fingerprint, FULL.identity, FULL.geometry, FULL.encoding, None)
    refused(Fingerprint, FULL.geometry, FULL.geometry, FULL.encoding)


def test_values_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.identity.model_name = "other"  # type: ignore[misc]


def test_value_knows_all_fields_and_no_other() -> None:
    assert len(FIELDS) == 25
    assert {type(FULL.value(field)) for field in FIELDS} == {str, int}
    refused(FULL.value, "identity.colour")


def test_attention_kind_has_one_spelling() -> None:
    assert attention_kind(32, 32) == "mha"
    assert attention_kind(32, 8) == "gqa"
    assert attention_kind(32, 1) == "mqa"
    assert attention_kind(1, 1) == "mha"
    for heads in ((8, 32), (0, 0), (8, 0), (8.0, 8)):
        refused(attention_kind, *heads)


def test_differences_read_well() -> None:
    text = str(FULL.differences(changed(FULL, geometry__layers=33))[0])
    assert text == "geometry.layers: stored 32, offered 33"
