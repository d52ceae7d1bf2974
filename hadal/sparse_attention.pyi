from hadal.plugins.sparse_attention import *
