"""The model of issue slots on loops of which the cycles can be counted by hand."""

import pytest
from gem_kernels.bench import issue
from gem_kernels.bench.issue import Instruction, cycles

LISTING = """
.L_x_1:
        /*0a10*/                   DEPBAR.LE SB0, 0x2 ;                 /* 0x000080800000791a */
                                                                        /* 0x000fc80000000000 */
        /*0a20*/              @!P0 LDS.128 R20, [R59+UR10] ;            /* 0x0000000a3b147984 */
                                                                        /* 0x000e620008000c00 */
        /*0a30*/                   FADD R2, R2, R20 ;                   /* 0x0000001402027221 */
                                                                        /* 0x002fc80000000000 */
        /*0a40*/               @P0 BRA `(.L_x_1) ;                      /* 0xfffffffc00f00947 */
                                                                        /* 0x000fea000383ffff */
"""


def test_control_words():
    code, labels = issue.parse(LISTING)
    assert labels == {".L_x_1": 0}
    assert [x.base for x in code] == ["DEPBAR", "LDS", "FADD", "BRA"]
    assert (code[0].pending, code[0].stall) == (2, 4)
    assert (code[1].size, code[1].stall, code[1].sets) == (16, 1, 1)
    assert (code[2].waits, code[2].stall) == (0b10, 4)
    assert issue.main_loop(code, labels) == code


@pytest.mark.parametrize(("programs", "expected"), [(1, 80), (4, 80), (16, 80), (32, 160)])
def test_latency_then_slots(programs, expected):
    """20 operations that need each other: 4 cycles each, until five warps and more share a scheduler."""
    loop = [Instruction("FADD R1, R1, R1", 4)] * 20
    assert cycles(loop, 1, programs) == pytest.approx(expected, rel=0.07)


def test_units_and_scoreboards():
    special = [Instruction("MUFU.EX2 R1, R2", 1)] * 10
    assert cycles(special, 1, 4) == pytest.approx(80, abs=2)
    assert cycles(special, 1, 8) == pytest.approx(160, rel=0.07)
    shuffle = [Instruction("SHFL.BFLY PT, R1, R2, 0x1, 0x1f", 1, sets=0), Instruction("FADD R2, R1, R1", 4, waits=1)]
    assert cycles(shuffle * 5, 1, 1) == pytest.approx(5 * (24 + 4), abs=5)


def test_memory():
    """A load, waited for, then its bytes: latency for one warp, the rate for many."""
    loop = [Instruction("LDG.E.128 R1, [R2]", 1, sets=0), Instruction("FADD R2, R1, R1", 1, waits=1)]
    assert cycles(loop, 1, 1) == pytest.approx(issue.LATENCY + 512 / issue.RATE, rel=0.02)
    assert 48 * 512 / cycles(loop, 1, 48) / issue.RATE == pytest.approx(1, rel=0.15)


def test_a_barrier_holds_until_the_last():
    loop = [Instruction("FADD R1, R1, R1", 4)] * 5 + [Instruction("BAR.SYNC 0x0", 1)]
    assert cycles(loop, 4, 1) == pytest.approx(20 + 12, abs=2)


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "expected"),
    [(128, 4, 16384, 4), (168, 4, 0, 3), (32, 1, 0, 32), (64, 4, 100 * 1024, 2)],
)
def test_programs_of_an_sm(registers, warps, shared, expected):
    assert issue.resident(registers, warps, shared) == expected
