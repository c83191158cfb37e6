"""Compiled programs, as versions of XLA write them."""

OLD = """HloModule jit_f, num_partitions=4

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %ar = f32[8]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={op_name="jit(f)/while/body/\\"odd\\" name" source_file="/home/me/net work.py" source_line=7}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %ag = f32[32]{0} all-gather(%a), replica_groups=[1,4]<=[4], dimensions={0}
  %use = f32[32]{0} negate(%ag), metadata={op_name="jit(f)/neg" source_file="/home/me/a.py" source_line=3}
  ROOT %w = f32[8]{0} while(%a), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""  # noqa: E501
