#include "rows.inc"
EVERSTEP_ROW_KERNELS(kRowsAvx2, "avx2")
