#include "rows.inc"
EVERSTEP_ROW_KERNELS(kRowsBase, "base")
