import sys; sys.path.insert(0,"tests/sm90")
from hopper import *
S=LayoutSpec("seqused", slack=3)
cases={
"A":lambda:execute("Variant()", Shape((300,5),(257,0),2,1,64,64), S),
"B":lambda:execute("Variant()", Shape((300,300),(257,257),2,1,64,64)),
"C":lambda:execute("Variant()", Shape((300,5),(257,40),2,1,64,64), S),
"D":lambda:execute("Variant()", Shape((5,),(0,),1,1,64,64)),
"E":lambda:execute("Variant()", Shape((130,0,260),(300,100,1),2,2,64,64), LayoutSpec("varlen")),
"F":lambda:execute("Variant()", Shape((300,140),(257,128),2,1,64,64), S),
"G":lambda:execute("Variant()", Shape((300,0),(257,128),2,1,64,64), S),
"H":lambda:execute("Variant()", Shape((300,),(290,),2,1,64,64)),
"I":lambda:execute("Variant()", Shape((300,),(257,),2,1,64,64), LayoutSpec("seqused", slack=0)),
"J":lambda:execute("Variant()", Shape((300,),(257,),2,1,64,64), S),
"K":lambda:execute("Variant(mask=mask.causal())", Shape((2000,1999),(2000,1001),8,2,128,128), S),
}
n=sys.argv[1]
try: cases[n](); print(n,"ok")
except Exception as e: print(n,"FAIL",type(e).__name__, str(e).splitlines()[0][:200])
