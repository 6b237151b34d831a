"""Units of bytes. Free of imports, so that the GPU check can load the planner's arithmetic without pydantic."""

GIB = 2**30
GB = 10**9
