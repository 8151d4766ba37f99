"""Reading SASS: special functions by loop, and registers that some way leaves unwritten."""

from __future__ import annotations

from gem_kernels import sass

# A first loop that may be skipped makes half a descriptor (UR8); the second loop uses all of it.
TWO_LOOPS = """
        /*0000*/                   ULDC UR4, c[0x0][0x210] ;
        /*0010*/                   S2R R0, SR_TID.X ;
        /*0020*/                   ISETP.GE.AND P0, PT, R0, UR4, PT ;
        /*0030*/               @P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0040*/                   UMOV UR8, UR4 ;
        /*0050*/                   UIADD3 UR9, UR4, 0x1, URZ ;
        /*0060*/                   MUFU.EX2 R2, R0 ;
        /*0070*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0080*/                   UMOV UR9, UR4 ;
        /*0090*/                   UMOV UR10, UR4 ;
        /*00a0*/                   UMOV UR11, UR4 ;
        /*00b0*/                   HGMMA.64x8x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*00c0*/                   MUFU.TANH R4, R0 ;
        /*00d0*/                   MUFU.TANH R4, R4 ;
        /*00e0*/               @P1 BRA `(.L_x_1) ;
        /*00f0*/                   MUFU.RCP R4, R4 ;
        /*0100*/                   EXIT ;
.L_x_2:
        /*0110*/                   BRA `(.L_x_2);
"""


def test_special_functions_in_loops_with_products() -> None:
    found = sass.report(TWO_LOOPS)
    assert (found.special, found.special_in_loops) == (4, 2)


def test_a_register_that_a_skipped_loop_writes() -> None:
    assert sass.report(TWO_LOOPS).undefined == ("HGMMA.64x8x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT reads UR8",)
    mended = TWO_LOOPS.replace("S2R R0, SR_TID.X", "UMOV UR8, UR4")
    assert sass.report(mended).undefined == ()


def test_a_copy_of_what_is_not_written_matters_where_it_is_used() -> None:
    kept = """
        /*0000*/                   R2UR UR12, R237 ;
        /*0010*/              @UP4 UMOV UR12, UR10 ;
        /*0020*/              @UP4 UIADD3 UR6, UR12, 0x1, URZ ;
        /*0030*/                   MOV R237, UR12 ;
        /*0040*/                   EXIT ;
"""
    written = "        /*0000*/                   ULDC UR10, c[0x0][0x208] ;"
    assert sass.report(written + kept).undefined == ()
    assert sass.report(kept).undefined == ("UIADD3 UR6, UR12, 0x1, URZ reads UR12",)
    used = kept.replace("@UP4 UMOV UR12, UR10", "NOP")
    assert sass.report(written + used).undefined == ("UIADD3 UR6, UR12, 0x1, URZ reads UR12",)


def test_a_branch_table_reaches_every_target() -> None:
    table = """
        /*0000*/                   LDC R2, c[0x2][0x0] ;
        /*0010*/                   BRX R2 -0x20                (*"BRANCH_TARGETS .L_x_0,.L_x_1"*);
.L_x_0:
        /*0020*/                   ULDC.64 UR4, c[0x0][0x208] ;
.L_x_1:
        /*0030*/                   UIADD3 UR6, UR5, 0x1, URZ ;
        /*0040*/                   EXIT ;
"""
    assert sass.report(table).undefined == ("UIADD3 UR6, UR5, 0x1, URZ reads UR5",)
