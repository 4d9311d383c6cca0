"""Which operations make up a layer."""

from __future__ import annotations

from hpcsched.worker.layers.fuse import Op, fuse

HEAVY = True


def test_what_follows_weights_belongs_to_their_layer() -> None:
    ops = [Op((-1,), HEAVY), Op((0,)), Op((1,)), Op((2,), HEAVY), Op((3,))]
    assert fuse(ops) == [[0, 1, 2], [3, 4]]


def test_what_precedes_the_first_weights_belongs_to_their_layer() -> None:
    assert fuse([Op((-1,)), Op((0,)), Op((1,), HEAVY)]) == [[0, 1, 2]]


def test_where_layers_meet_a_layer_begins_and_its_activation_belongs_to_it() -> None:
    # 0 stem; 1 branch; 2 add(0, 1); 3 relu; 4 head
    ops = [Op((-1,), HEAVY), Op((0,), HEAVY), Op((0, 1)), Op((2,)), Op((3,), HEAVY)]
    assert fuse(ops) == [[0], [1], [2, 3], [4]]


def test_the_pooling_at_a_branchs_beginning_belongs_to_the_branch() -> None:
    # 0 stem; 1 pool; 2 convolution of the pool; 3 convolution beside it; 4 join
    ops = [Op((-1,), HEAVY), Op((0,)), Op((1,), HEAVY), Op((0,), HEAVY), Op((2, 3))]
    assert fuse(ops) == [[0], [1, 2], [3], [4]]


def test_a_branch_without_weights_is_a_layer_of_its_own() -> None:
    ops = [Op((-1,), HEAVY), Op((0,)), Op((0,), HEAVY), Op((1, 2))]
    assert fuse(ops) == [[0], [1], [2], [3]]


def test_a_gate_made_of_the_layers_own_result_belongs_to_it() -> None:
    # 0 linear; 1 sigmoid(0); 2 = 0 * 1; 3 dropout
    ops = [Op((-1,), HEAVY), Op((0,)), Op((0, 1)), Op((2,))]
    assert fuse(ops) == [[0, 1, 2, 3]]


def test_branches_with_weights_between_them_are_never_merged_into_one() -> None:
    # squeeze and excite: 0 conv; 1 mean; 2 fc; 3 fc + gate; 4 product
    ops = [Op((-1,), HEAVY), Op((0,)), Op((1,), HEAVY), Op((2,), HEAVY), Op((0, 3))]
    assert fuse(ops) == [[0], [1, 2], [3], [4]]


def test_what_must_not_leave_its_layer_takes_along_all_that_lies_between() -> None:
    # 2 needs a value of 0 that must not travel, and also reads 1, which reads 0: all are one.
    ops = [Op((-1,), HEAVY), Op((0,), HEAVY), Op((0, 1), tied=frozenset({0})), Op((2,), HEAVY)]
    assert fuse(ops) == [[0, 1, 2], [3]]


def test_layers_come_after_those_they_read_from_and_else_in_the_models_order() -> None:
    # Merging 0 and 4 would put 4 first by its beginning: the order must still be one that can run.
    ops = [Op((-1,), HEAVY), Op((-1,), HEAVY), Op((1,), HEAVY), Op((0,), HEAVY), Op((2, 3)), Op((4, 0))]
    layers = fuse(ops)
    place = {op: i for i, layer in enumerate(layers) for op in layer}
    assert all(place[r] <= place[i] for i, op in enumerate(ops) for r in op.reads if r >= 0)
    assert layers[:4] == [[0], [1], [2], [3]]
