"""The names that programs written for DeepSpeed import, each mapped to its counterpart in Hadal.

Words of this folder.

surface      the names of DeepSpeed that programs use (`surface.json`)
home         the place in Hadal that a name of the surface maps to (`homes.json`)
placeholder  an object in place of a name that is not built; it raises when called or used
alias        a module named `deepspeed...` that maps to Hadal once the aliases are installed
"""
