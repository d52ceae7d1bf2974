"""The names that programs written for DeepSpeed import, each led to the house below.

Words of this folder.

surface      the names of DeepSpeed that programs use (`surface.json`)
home         where in Hadal a name of the surface leads (`homes.py`); without one it is not built
placeholder  what stands for a name that is not built: it says so when it is called or used
alias        the modules called `deepspeed` that stand for Hadal, once they are installed
"""
