from hadal.plugins.tensor_parallel import *
