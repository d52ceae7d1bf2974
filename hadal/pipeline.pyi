from hadal.plugins.pipeline import *
