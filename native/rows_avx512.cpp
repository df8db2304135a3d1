#include "rows.inc"
EVERSTEP_ROW_KERNELS(kRowsAvx512, "avx512")
